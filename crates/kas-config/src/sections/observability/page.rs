//! Section `observability.page`.

use http::Uri;
use settings::walk::Section;

use crate::sections::origin::origin_of;

/// The path of the page; no other path of the observability listener may be below it.
pub const PAGE_PATH: &str = "/page/";

const NOT_SHOWN: &str = "the page is not served unless enabled is true";

/// Section `observability.page`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// How many viewers may be connected at once; at least one.
    pub viewers: u32,
    /// Whether it shows the names of callers.
    pub callers: bool,
    /// Whether it shows how many objects the clusters of agents have.
    pub views: bool,
    /// Where browsers reach the page with the trees of clusters, for a link; `None`: there is no link.
    pub clusters_url: Option<String>,
    /// Host names of this replica in URLs, besides those that no other site can have.
    pub hosts: Vec<String>,
}

/// Declares the keys of the section.
pub(super) fn page(s: &mut Section<'_, '_>) -> Option<Page> {
    let enabled = s.flag(
        "enabled",
        "Serve the page. Everyone who can reach this listener then sees the names and numbers of agents and replicas.",
    );
    let idle = (!enabled && !s.is_refused("enabled")).then_some(NOT_SHOWN);
    let page = s.optional(idle, |s| {
        let viewers = s.number(
            "viewers",
            32,
            "Maximum number of open pages, up to 1000. Each costs about 1 KB a second.",
        );
        if viewers > 1_000 {
            s.refuse("viewers", "a number from 1 to 1000");
        }
        let callers = s.flag(
            "callers",
            "Show which callers have watches, exec and other long requests open through agent.kubernetes_api. Otherwise \
             the page shows only how many there are, by kind and by source of the callers.",
        );
        let views = s.flag(
            "views",
            "Show how many nodes, namespaces, workloads and pods the clusters of agents have, and how those are: numbers \
             only, no names. They are read with the rights of agentk while somebody looks.",
        );
        let hosts = s.texts(
            "hosts",
            &[],
            "Host names by which browsers reach the page, without a port, such as kas.example.com. IP addresses, \
             localhost, names without a dot and names in .svc are always accepted, because no other site can have \
             such a name.",
        );
        if hosts.iter().any(|host| host.is_empty() || host.contains(['/', ':', '*'])) {
            s.refuse("hosts", "names without scheme, port, path and wildcard, such as kas.example.com");
        }
        Page { viewers, callers, views, clusters_url: clusters_url(s), hosts }
    });
    enabled.then_some(page)
}

fn clusters_url(s: &mut Section<'_, '_>) -> Option<String> {
    const KEY: &str = "clusters_url";
    let doc = "Where browsers reach the page of agent.kubernetes_api.page, such as \
               https://kas.example.com/fleet/page/. The page of an agent then has a link to the tree of its cluster, \
               which asks for a credential.";
    let text = s.optional_text(KEY, "", doc)?;
    let is_url = |url: &Uri| origin_of(url).is_some() && url.query().is_none();
    if !text.contains('#') && text.parse::<Uri>().is_ok_and(|url| is_url(&url)) {
        return Some(text);
    }
    // The URL may contain a password.
    let expected =
        "an http or https URL without a user and a query, such as https://kas.example.com/fleet/page/";
    match text.contains('@') {
        true => s.refuse_as(KEY, "something with an `@` (not shown)", expected),
        false => s.refuse(KEY, expected),
    }
    None
}
