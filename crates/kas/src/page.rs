//! The status page on the observability listener: the replicas, their agents, and how requests for an agent
//! are routed. It is read-only, and shows no more than `kasctl replicas`, `agents` and `why`.
//!
//! The browser gets some files, and then one stream of server-sent events. `feed` creates the events, only
//! while the page has viewers. `shown` defines their content.
//!
//! The page with the trees of clusters (`of_clusters`) is another one, on the endpoint for kubectl: there
//! its user gives it a credential, and it reads views as every client does.

mod clusters;
mod feed;
mod metrics;
mod shown;

use std::{
    convert::Infallible,
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
};

use bytes::Bytes;
use futures_util::StreamExt as _;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode,
    header::{
        CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, LOCATION, REFERRER_POLICY, RETRY_AFTER,
        X_CONTENT_TYPE_OPTIONS,
    },
};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody};
use ids::AgentId;
use kubernetes_api::{OwnPage, PageFile};
use net::admin::{Body, Site};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use self::feed::{Feed, View};
pub use self::{feed::Source, metrics::PageMetrics};
use kas_config::{self, PAGE_PATH as PATH};

/// Only files of this folder are loaded, and no other page may embed this one.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
                      trusted-types 'none'";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: PageFile = PageFile {
    name: "page.css",
    content_type: "text/css; charset=utf-8",
    content: include_str!("page/page.css"),
};
const ICON: PageFile =
    PageFile { name: "icon.svg", content_type: "image/svg+xml", content: include_str!("page/icon.svg") };
const COMMON: PageFile =
    PageFile { name: "common.js", content_type: SCRIPT, content: include_str!("page/common.js") };

/// The files below [`PATH`].
const FILES: &[PageFile] = &[
    PageFile { name: "", content_type: HTML, content: include_str!("page/index.html") },
    PageFile { name: "page.js", content_type: SCRIPT, content: include_str!("page/page.js") },
    COMMON,
    STYLE,
    ICON,
];

/// What changes, as server-sent events.
const EVENTS: &str = "events";

/// The files of the page with the trees of clusters.
const OF_CLUSTERS: &[PageFile] = &[
    PageFile { name: "", content_type: HTML, content: include_str!("page/clusters.html") },
    PageFile { name: "clusters.js", content_type: SCRIPT, content: include_str!("page/clusters.js") },
    COMMON,
    STYLE,
    ICON,
];

/// Returns the headers of every answer of a page.
fn headers() -> [(HeaderName, HeaderValue); 6] {
    let of = HeaderValue::from_static;
    [
        (CONTENT_SECURITY_POLICY, of(POLICY)),
        (X_CONTENT_TYPE_OPTIONS, of("nosniff")),
        (REFERRER_POLICY, of("no-referrer")),
        (CACHE_CONTROL, of("no-store")),
        (HeaderName::from_static("cross-origin-resource-policy"), of("same-origin")),
        (HeaderName::from_static("cross-origin-opener-policy"), of("same-origin")),
    ]
}

/// Returns the names below [`PATH`].
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|file| file.name).chain([EVENTS])
}

/// Returns the page with the trees of clusters, for the endpoint for kubectl.
pub(crate) fn of_clusters() -> OwnPage {
    OwnPage { files: OF_CLUSTERS, headers: headers().into() }
}

/// The page.
pub struct Page {
    hosts: Vec<String>,
    viewers: Arc<Semaphore>,
    metrics: Arc<PageMetrics>,
    source: OnceLock<Arc<Source>>,
    /// The feed of all viewers, while there are any.
    feed: Mutex<Weak<Feed>>,
}

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Page").field("hosts", &self.hosts).finish_non_exhaustive()
    }
}

/// A viewer, which counts until it is dropped.
struct Viewer {
    _permit: OwnedSemaphorePermit,
    metrics: Arc<PageMetrics>,
}

impl Drop for Viewer {
    fn drop(&mut self) {
        self.metrics.page_viewers.dec();
    }
}

impl Page {
    /// Creates the page. Until [`serve`](Self::serve) it has no events, and shows that kas is starting.
    pub fn new(config: &kas_config::Page, metrics: Arc<PageMetrics>) -> Arc<Self> {
        Arc::new(Self {
            hosts: config.hosts.clone(),
            viewers: Arc::new(Semaphore::new(config.viewers as usize)),
            metrics,
            source: OnceLock::new(),
            feed: Mutex::default(),
        })
    }

    /// Sets what the page shows.
    pub fn serve(&self, source: Source) {
        let _ = self.source.set(Arc::new(source));
    }

    /// Returns the feed of all viewers. Starts it for the first one.
    fn feed(&self, source: &Arc<Source>) -> Arc<Feed> {
        // Each change is one assignment, so a panic cannot leave it inconsistent.
        let mut shared = self.feed.lock().unwrap_or_else(PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let feed = Feed::start(Arc::clone(source));
            *shared = Arc::downgrade(&feed);
            feed
        })
    }

    fn events(&self, request: &Request<()>) -> Response<Body> {
        if is_foreign(request.headers()) {
            return text(
                StatusCode::FORBIDDEN,
                "the events of this page are not available to other sites\n".to_owned(),
            );
        }
        let agent = match agent_of(request.uri().query()) {
            Ok(agent) => agent,
            Err(why) => return text(StatusCode::BAD_REQUEST, why),
        };
        let later = |why: &str| {
            let mut response = text(StatusCode::SERVICE_UNAVAILABLE, why.to_owned());
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("5"));
            response
        };
        let Some(source) = self.source.get() else { return later("kas is starting: try again\n") };
        let body = if request.method() == Method::HEAD {
            Full::default().boxed_unsync()
        } else {
            let Ok(permit) = Arc::clone(&self.viewers).try_acquire_owned() else {
                self.metrics.page_viewers_refused.inc();
                return later("too many viewers: observability.page.viewers is the limit\n");
            };
            self.metrics.page_viewers.inc();
            let viewer = Viewer { _permit: permit, metrics: Arc::clone(&self.metrics) };
            let view = View::new(self.feed(source), agent);
            let events = futures_util::stream::unfold((view, viewer), |(mut view, viewer)| async move {
                let event = view.next().await?;
                Some((Ok::<_, Infallible>(Frame::data(event)), (view, viewer)))
            });
            StreamBody::new(events.boxed()).boxed_unsync()
        };
        let mut response = Response::new(body);
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        // Otherwise nginx would buffer the events.
        headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
        response
    }

    fn route(&self, request: &Request<()>, name: &str) -> Response<Body> {
        if let Err(host) = self.check_host(request) {
            return text(
                StatusCode::MISDIRECTED_REQUEST,
                format!(
                    "this page answers at IP addresses, localhost and names without a dot; if {host} is a name of this \
                     replica too, add it to observability.page.hosts\n"
                ),
            );
        }
        if name == EVENTS {
            return self.events(request);
        }
        match FILES.iter().find(|file| file.name == name) {
            Some(PageFile { content_type, content, .. }) => {
                let mut response =
                    Response::new(Full::new(Bytes::from_static(content.as_bytes())).boxed_unsync());
                response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
                response
            }
            None => text(StatusCode::NOT_FOUND, format!("the page is at {PATH}\n")),
        }
    }

    /// Refuses host names that are not known to belong to this replica. Otherwise a site could read the page
    /// by DNS rebinding, in the browser of a user who can reach this port.
    fn check_host(&self, request: &Request<()>) -> Result<(), String> {
        let given = match request.uri().host() {
            Some(host) => Some(host),
            None => request.headers().get(HOST).and_then(|host| host.to_str().ok()),
        };
        let host = given.unwrap_or_default();
        let name = without_port(host);
        if is_own(name) || self.hosts.iter().any(|own| own.eq_ignore_ascii_case(name)) {
            return Ok(());
        }
        let shown: String = name.escape_debug().take(253).collect();
        Err(if shown.is_empty() { "no name".to_owned() } else { shown })
    }
}

impl Site for Page {
    fn answer(&self, request: &Request<()>) -> Option<Response<Body>> {
        let path = request.uri().path();
        let mut response = if path == PATH.trim_end_matches('/') {
            let mut response = text(StatusCode::PERMANENT_REDIRECT, format!("{PATH}\n"));
            // Relative, since a proxy may serve the page below another path.
            response.headers_mut().insert(LOCATION, HeaderValue::from_static("page/"));
            response
        } else {
            self.route(request, path.strip_prefix(PATH)?)
        };
        response.headers_mut().extend(headers());
        Some(response)
    }

    fn path(&self) -> &str {
        PATH
    }
}

fn text(status: StatusCode, text: String) -> Response<Body> {
    let mut response = Response::new(Full::new(Bytes::from(text)).boxed_unsync());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

/// Whether the browser reports that another site sends the request. That site could not read the events, but
/// would count as a viewer.
fn is_foreign(headers: &HeaderMap) -> bool {
    headers.get("sec-fetch-site").is_some_and(|site| site != "same-origin" && site != "none")
}

fn without_port(host: &str) -> &str {
    match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((inner, _)) => inner,
        None if host.parse::<Ipv6Addr>().is_ok() => host,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    }
}

/// Whether nobody outside this network can point the name to another address.
fn is_own(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    !name.is_empty()
        && (name.parse::<IpAddr>().is_ok()
            || !name.contains('.')
            || [".localhost", ".svc", ".svc.cluster.local"].iter().any(|end| name.ends_with(end)))
}

/// Returns the agent in the query.
fn agent_of(query: Option<&str>) -> Result<Option<AgentId>, String> {
    let Some(query) = query.filter(|query| !query.is_empty()) else { return Ok(None) };
    let id = query.strip_prefix("agent=").and_then(|id| id.parse().ok());
    match id.and_then(|id| AgentId::new(id).ok()) {
        Some(agent) => Ok(Some(agent)),
        None => Err("the only supported query is agent= and the id of an agent\n".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    fn page() -> Arc<Page> {
        let config = kas_config::Page {
            viewers: 1,
            callers: false,
            views: false,
            clusters_url: None,
            hosts: vec!["kas.example.com".to_owned()],
        };
        Page::new(&config, Arc::new(PageMetrics::new(&mut Registry::default())))
    }

    fn get(page: &Page, path: &str, headers: &[(&str, &str)]) -> Option<Response<Body>> {
        let mut request = Request::builder().uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        page.answer(&request.body(()).unwrap())
    }

    #[test]
    fn names_open_to_dns_rebinding_are_refused() {
        let page = page();
        let status = |host: &str| get(&page, "/page/", &[("host", host)]).unwrap().status();
        for host in [
            "127.0.0.1:8151",
            "[::1]:8151",
            "10.0.0.7",
            "localhost:8151",
            "kas:8151",
            "kas-0.kas-peers.kas.svc:8151",
            "kas.kas.svc.cluster.local",
            "KAS.example.com:443",
        ] {
            assert_eq!(status(host), StatusCode::OK, "{host}");
        }
        for host in
            ["evil.example", "127.0.0.1.evil.example:8151", "kas.example.com.evil.example", "", "svc."]
        {
            assert_eq!(status(host), StatusCode::MISDIRECTED_REQUEST, "{host}");
        }
        assert_eq!(get(&page, "/page/", &[]).unwrap().status(), StatusCode::MISDIRECTED_REQUEST);
    }

    #[test]
    fn every_response_has_the_security_headers() {
        let page = page();
        for path in
            ["/page", "/page/", "/page/page.js", "/page/nothing", "/page/events", "/page/events?agent=x"]
        {
            let response = get(&page, path, &[("host", "localhost")]).unwrap();
            let header =
                |name: &str| response.headers().get(name).unwrap_or_else(|| panic!("{path}: no {name}"));
            assert!(header("content-security-policy").to_str().unwrap().starts_with("default-src 'none'"));
            assert_eq!(header("x-content-type-options"), "nosniff");
            assert_eq!(header("referrer-policy"), "no-referrer");
            assert_eq!(header("cache-control"), "no-store");
        }
        assert!(get(&page, "/pages", &[("host", "localhost")]).is_none());
        assert!(get(&page, "/", &[("host", "localhost")]).is_none());
    }

    #[test]
    fn events_are_refused_to_other_sites_and_for_invalid_queries() {
        let page = page();
        let status = |path: &str, site: &str| {
            let headers = [("host", "localhost"), ("sec-fetch-site", site)];
            get(&page, path, &headers).unwrap().status()
        };
        // There is no source yet.
        assert_eq!(status("/page/events", "same-origin"), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(status("/page/events?agent=7", "none"), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(status("/page/events", "cross-site"), StatusCode::FORBIDDEN);
        assert_eq!(status("/page/events", "same-site"), StatusCode::FORBIDDEN);
        for query in ["agent=0", "agent=-1", "agent=x", "agent=99999999999999999999", "other=1"] {
            assert_eq!(status(&format!("/page/events?{query}"), "none"), StatusCode::BAD_REQUEST, "{query}");
        }
    }

    #[test]
    fn the_pages_link_only_to_their_own_files_and_keep_and_draw_no_markup() {
        for files in [FILES, OF_CLUSTERS] {
            for PageFile { name, content, .. } in files {
                let allowed = content.replace("http://www.w3.org/2000/svg", "");
                assert!(!allowed.contains("://"), "{name} refers to another site");
                for wrong in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
                    assert!(!content.contains(wrong), "{name} has {wrong}");
                }
            }
            let html = files[0].content;
            for attribute in ["src=\"", "href=\""] {
                for (at, _) in html.match_indices(attribute) {
                    let name = html[at + attribute.len()..].split('"').next().unwrap();
                    assert!(name.starts_with('#') || files.iter().any(|file| file.name == name), "{name}");
                }
            }
        }
        // The credential must not outlive the page.
        let script = OF_CLUSTERS[1].content;
        for wrong in ["localStorage", "sessionStorage", "indexedDB", "document.cookie", "console."] {
            assert!(!script.contains(wrong), "{wrong}");
        }
    }

    #[test]
    fn the_page_with_the_trees_has_the_same_policy() {
        let page = of_clusters();
        let of = |name: &str| page.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value);
        assert_eq!(of("content-security-policy").unwrap(), POLICY);
        assert!(POLICY.contains("frame-ancestors 'none'") && POLICY.contains("connect-src 'self'"));
    }
}
