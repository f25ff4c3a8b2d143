//! What a request to a Kubernetes API server is, derived from its head in the same way as the API server does
//! it. There is no I/O, no clock and no state.
//!
//! * [`Target`]: path and query as the client sent them, and the path decoded once. Every decision is made on
//!   the decoded path, because that is the path that the API server acts on.
//! * [`RequestInfo`]: verb, group, namespace, resource and name, as in kube-apiserver's `RequestInfo`.
//! * [`Kind`]: how long a request may last and how it may end. [`Upgrade`]: to which protocol it upgrades.
//! * [`EventEnds`]: where the answer to a watch may end.
//! * [`RequestInfo::access_verb`]: the verb for rules about who may do what.
//! * [`headers`]: canonical names, and the lists of headers that are dropped or forwarded.
//! * [`Status`]: an error as Kubernetes clients expect it.
//!
//! ```
//! use kube_request::{Kind, RequestInfo, Target};
//!
//! let target = Target::parse("/apis/apps/v1/namespaces/shop/deployments?watch=1")?;
//! let info = RequestInfo::new("GET", &target);
//! assert_eq!((info.verb(), info.resource(), info.api_group()), ("watch", "deployments", "apps"));
//! assert_eq!(info.namespace(), "shop");
//! assert_eq!(Kind::of(&info, None), Kind::Watch);
//! # Ok::<_, kube_request::InvalidTarget>(())
//! ```

mod event_ends;
pub mod headers;
mod info;
mod kind;
mod query;
mod selector;
mod status;
mod target;
mod upgrade;

pub use self::{
    event_ends::EventEnds,
    info::{CONNECT, RequestInfo},
    kind::Kind,
    query::Parameters,
    status::{Status, reason},
    target::{InvalidTarget, Target, escape},
    upgrade::Upgrade,
};
