//! What requests through the tunnel may do in this cluster, by the decision of the cluster's owner: the file
//! of `--policy-file`.
//!
//! Without it, kas may do everything that agentk's own credentials allow, which is all that RBAC can limit:
//! it cannot tell one request of agentk from another. With it, a compromised kas can be whoever the policy
//! allows, and do what it allows, and nothing else.
//!
//! * [`Policy`] is parsed from YAML and decides without I/O, on the same classification of requests as kas
//!   and the API server.
//! * [`Identity`] says as whom a request runs. `Impersonate-*` headers count, whether kas or its caller set
//!   them.
//! * [`PolicyFile`] reloads the file. If it becomes invalid, the last valid policy stays in use.
//!
//! A policy judges verb, resource, namespace and path. It does not see bodies: who may create pods may run
//! anything that a pod of that namespace may.

mod decide;
mod file;
mod identity;
mod parse;
mod pattern;

pub(crate) use self::file::{Decision, read};
pub use self::{
    decide::{Policy, Refusal, Rule, RuleName, Subjects, What},
    file::{LARGEST, PolicyError, PolicyFile, PolicyMetrics},
    identity::{Identity, InvalidIdentity},
    parse::parse,
    pattern::{PathPattern, ResourceName, SubjectPattern},
};

#[cfg(test)]
mod tests;
