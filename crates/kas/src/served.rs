//! Everything that kas serves by HTTP, and who may ask for it. The listeners decide by these tables.

use crate::{direct, hooks, page};

/// A listener for HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HttpListener {
    /// `agent.kubernetes_api.listen`.
    Kubernetes,
    /// `hooks.listen`.
    Hooks,
    /// `direct.listen`.
    Direct,
    /// `observability.listen`: besides the paths of the configuration, which are for everybody.
    Observability,
}

/// Who may ask for a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Everybody who reaches the listener.
    Everybody,
    /// A caller with a credential of `agent.kubernetes_api`.
    Caller,
    /// A sender with the secret of the hook that the path names.
    Sender,
    /// A proxy with the secret of all proxies.
    Proxy,
}

/// A path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedPath {
    /// Where it is served.
    pub listener: HttpListener,
    /// The path. A segment `{…}` stands for any one, and `{*}` at the end for all that follow.
    pub pattern: String,
    /// The methods.
    pub methods: Vec<&'static str>,
    /// Who may ask.
    pub class: Class,
}

/// Returns every path of every listener. What has no path here, the endpoint for kubectl passes to the API
/// server of an agent, for callers with a credential.
pub fn paths() -> Vec<ServedPath> {
    let fleet = kubernetes_api::own_paths().map(|path| ServedPath {
        listener: HttpListener::Kubernetes,
        pattern: path.pattern.to_owned(),
        methods: path.methods.to_vec(),
        class: if path.is_for_everybody { Class::Everybody } else { Class::Caller },
    });
    let hooks = hooks::ROUTES.iter().map(|route| ServedPath {
        listener: HttpListener::Hooks,
        pattern: route.pattern.to_owned(),
        methods: vec![route.method],
        class: match route.auth {
            hooks::Auth::OfHook => Class::Sender,
        },
    });
    let direct = direct::ROUTES.iter().map(|route| ServedPath {
        listener: HttpListener::Direct,
        pattern: route.path.to_owned(),
        methods: route.methods.to_vec(),
        class: match route.auth {
            direct::Auth::Proxy => Class::Proxy,
        },
    });
    let page = page::names().map(|name| ServedPath {
        listener: HttpListener::Observability,
        pattern: format!("{}{name}", kas_config::PAGE_PATH),
        methods: vec!["GET", "HEAD"],
        class: Class::Everybody,
    });
    fleet.chain(hooks).chain(direct).chain(page).collect()
}
