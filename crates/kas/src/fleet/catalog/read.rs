//! Reads a cluster: API groups, tables of workloads and Services, objects that tell of applications.

use std::collections::BTreeMap;

use ::fleet::{
    applications::{self, Kind, Told},
    components::{Component, Probe, Rules, VersionFrom},
    inventory::{self, Inventory, Service, Workload},
};
use cluster_call::{Cluster, ServiceRequest};
use futures_util::future::{try_join, try_join_all};
use grpc::{Code, Status};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use kube_request::escape;
use views::{Form, Page, table};

use super::{Known, kept::Weigh};
use crate::views::{Source as _, Tunnel};

/// Objects on a page, and objects that are read whole on one.
const PAGE: usize = 500;
const PAGE_OF_OBJECTS: usize = 100;
/// The most objects of one kind, and the most pages, beside the first one of each namespace.
const MOST_OBJECTS: usize = 20_000;
const MOST_PAGES: usize = 500;
/// The most versions that components are asked for.
const MOST_PROBES: usize = 20;
/// The largest answer to such a question, in bytes.
const LARGEST_PROBE: usize = 64 << 10;
/// A page beyond this is read on another thread.
const LARGE: usize = 128 << 10;

const TABLE: &str = "application/json;as=Table;g=meta.k8s.io;v=v1";
const METADATA: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
const JSON: &str = "application/json";

/// The kinds of workloads: their names, and those in paths.
const WORKLOADS: [(&str, &str); 3] = [
    ("deployments.apps", "deployments"),
    ("statefulsets.apps", "statefulsets"),
    ("daemonsets.apps", "daemonsets"),
];

/// A list to read.
struct List<'a> {
    /// The kind, for people.
    what: &'a str,
    /// The group and version in the path.
    api: &'a str,
    plural: &'a str,
    query: &'a str,
    accept: &'a str,
    page: usize,
}

/// What was taken of a page.
struct Taken {
    /// Names the next page; empty: there is none.
    next: String,
    objects: usize,
    /// What is kept of it.
    bytes: usize,
}

impl Taken {
    fn of<T: Weigh>(next: String, items: &[T]) -> Self {
        Self { next, objects: items.len(), bytes: items.iter().map(Weigh::weigh).sum() }
    }
}

/// Reads one cluster as one user.
pub(super) struct Reader<'a> {
    tunnel: Tunnel,
    namespaces: &'a [String],
}

impl<'a> Reader<'a> {
    /// `namespaces`: only these; empty: all.
    pub(super) fn new(cluster: Cluster, namespaces: &'a [String]) -> Self {
        Self { tunnel: Tunnel::new(cluster), namespaces }
    }

    /// Reads groups, workloads and Services, and finds components in them.
    ///
    /// # Errors
    /// Why the cluster gives no answer. What may not be read is no error, and is named.
    pub(super) async fn known(&self, rules: &Rules) -> Result<Known, String> {
        let mut missing = Vec::new();
        let answer = self.tunnel.get("/apis", JSON).await.map_err(|status| text(&status))?;
        let groups = match answer.status {
            200 => inventory::groups(&answer.body).map_err(|error| error.to_string())?,
            status => {
                missing.push(refused("the API groups", status, &answer.body));
                BTreeMap::new()
            }
        };
        let lists = WORKLOADS.map(|(what, plural)| List {
            what,
            api: "apis/apps/v1",
            plural,
            query: "includeObject=Metadata",
            accept: TABLE,
            page: PAGE,
        });
        let services = List { what: "services", api: "api/v1", plural: "services", ..table_of() };
        let reading = lists.iter().map(|list| {
            self.rows(list, move |page| {
                let is_without = column(page, "Images").is_none() && !page.rows.is_empty();
                let gap = is_without.then(|| format!("{}: the API server prints no images", list.what));
                (workloads(list.what, page).collect(), gap)
            })
        });
        let services = self.rows(&services, |page| (of_services(page).collect(), None));
        let (workloads, (services, gaps)) = try_join(try_join_all(reading), services).await?;
        let mut inventory = Inventory { groups, services, ..Inventory::default() };
        for (workloads, gaps) in workloads {
            missing.extend(gaps);
            inventory.workloads.extend(workloads);
        }
        missing.extend(gaps);
        let found = rules.find(&inventory);
        let mut components = found.components;
        if found.is_cut {
            missing.push(format!("there are more than {} components", components.len()));
        }
        self.probe(&mut components, &found.probes).await;
        let labelled = applications::of_labels(&inventory);
        Ok(Known { components, labelled, groups: inventory.groups, missing })
    }

    /// Asks components for their versions. One without an answer has none.
    async fn probe(&self, components: &mut [Component], probes: &[(usize, Probe)]) {
        let asked = probes.iter().take(MOST_PROBES).filter_map(|(index, probe)| {
            let service = components.get(*index)?.service.parse().ok()?;
            Some(async move {
                let headers =
                    HeaderMap::from_iter([(header::ACCEPT, HeaderValue::from_static("application/json"))]);
                let request = ServiceRequest {
                    service: &service,
                    method: Method::GET,
                    path: &probe.path,
                    headers: &headers,
                    body: bytes::Bytes::new(),
                };
                let answer = self.tunnel.cluster().call_service(request).await.ok()?;
                let is_answer = answer.status == StatusCode::OK && answer.body.len() <= LARGEST_PROBE;
                is_answer.then(|| probe.version(&answer.body)).flatten().map(|version| (*index, version))
            })
        });
        let answers = futures_util::future::join_all(asked).await;
        for (index, version) in answers.into_iter().flatten() {
            if let Some(component) = components.get_mut(index) {
                (component.version, component.version_from) = (version, Some(VersionFrom::Probe));
            }
        }
    }

    /// Reads what objects of known kinds tell of applications. Also returns what may not be read.
    ///
    /// # Errors
    /// Why the cluster gives no answer.
    pub(super) async fn told(
        &self,
        groups: &BTreeMap<String, String>,
        helm: bool,
    ) -> Result<(Vec<Told>, Vec<String>), String> {
        let (mut told, mut missing) = (Vec::new(), Vec::new());
        for kind in Kind::ALL {
            let Some(version) = groups.get(kind.group()) else { continue };
            let (api, what) = (
                format!("apis/{}/{}", escape(kind.group()), escape(version)),
                format!("{}.{}", kind.plural(), kind.group()),
            );
            let list = List {
                what: &what,
                api: &api,
                plural: kind.plural(),
                query: "",
                accept: JSON,
                page: PAGE_OF_OBJECTS,
            };
            let gaps = self
                .pages(&list, |body| {
                    let page = applications::page(kind, body).map_err(|error| error.to_string())?;
                    let taken = Taken::of(page.next, &page.told);
                    told.extend(page.told);
                    Ok(taken)
                })
                .await?;
            missing.extend(gaps);
        }
        if helm {
            let list = List {
                what: "secrets",
                api: "api/v1",
                plural: "secrets",
                query: "labelSelector=owner%3Dhelm",
                accept: METADATA,
                page: PAGE,
            };
            let mut secrets = Vec::new();
            let gaps = self
                .pages(&list, |body| {
                    let page = table::page(Form::Metadata, body).map_err(|error| error.to_string())?;
                    let mut rows: Vec<(String, String)> =
                        page.rows.into_iter().map(|row| (row.namespace, row.labels)).collect();
                    let taken = Taken::of(page.next, &rows);
                    secrets.append(&mut rows);
                    Ok(taken)
                })
                .await?;
            missing.extend(gaps);
            let secrets =
                secrets.iter().map(|(namespace, labels)| (namespace.as_str(), inventory::labels(labels)));
            told.extend(applications::of_helm(secrets));
        }
        Ok((told, missing))
    }

    /// Reads a list as tables. `reduce` gets a page, and returns what is kept of it, and what is missing.
    async fn rows<T: Weigh + Send>(
        &self,
        list: &List<'_>,
        reduce: impl Fn(&Page) -> (Vec<T>, Option<String>) + Send + Sync,
    ) -> Result<(Vec<T>, Vec<String>), String> {
        let (mut kept, mut missing) = (Vec::new(), None);
        let mut gaps = self
            .pages(list, |body| {
                let page = table::page(Form::Table, body).map_err(|error| error.to_string())?;
                let (mut items, gap) = reduce(&page);
                missing = missing.take().or(gap);
                let taken = Taken::of(page.next, &items);
                kept.append(&mut items);
                Ok(taken)
            })
            .await?;
        gaps.extend(missing);
        Ok((kept, gaps))
    }

    /// Reads a list page by page, in each namespace. `take` gets a page, and keeps what is needed of it.
    /// Returns what may not be read.
    async fn pages(
        &self,
        list: &List<'_>,
        mut take: impl FnMut(&[u8]) -> Result<Taken, String> + Send,
    ) -> Result<Vec<String>, String> {
        let mut gaps = Vec::new();
        let scopes: Vec<String> = match self.namespaces {
            [] => vec![String::new()],
            some => some.iter().map(|name| format!("/namespaces/{}", escape(name))).collect(),
        };
        let (mut count, mut pages) = (0, 0);
        for scope in scopes {
            let (mut next, mut limit) = (String::new(), list.page);
            loop {
                if !next.is_empty() || limit < list.page {
                    pages += 1;
                }
                if pages > MOST_PAGES {
                    gaps.push(format!("{}: there are more than {MOST_PAGES} pages", list.what));
                    return Ok(gaps);
                }
                let mut path = format!("/{}{scope}/{}?limit={limit}", list.api, list.plural);
                for more in [list.query, &continued(&next)] {
                    if !more.is_empty() {
                        path.push('&');
                        path.push_str(more);
                    }
                }
                let answer = match self.tunnel.get(&path, list.accept).await {
                    Err(status) if status.code() == Code::ResourceExhausted && limit > 1 => {
                        limit /= 2;
                        continue;
                    }
                    answer => answer.map_err(|status| text(&status))?,
                };
                match answer.status {
                    200 => {}
                    // The cluster has no such kind.
                    404 => break,
                    // The continuation is too old.
                    410 => {
                        gaps.push(format!("{}: the list changed faster than it could be read", list.what));
                        break;
                    }
                    status => {
                        gaps.push(refused(list.what, status, &answer.body));
                        break;
                    }
                }
                let Taken { next: after, objects, bytes } = if answer.body.len() > LARGE {
                    tokio::task::block_in_place(|| take(&answer.body))?
                } else {
                    take(&answer.body)?
                };
                // What was unpacked is given back here.
                drop(answer);
                self.tunnel.cluster().take(bytes).map_err(|status| text(&status))?;
                // A page without objects is work, too.
                count += objects.max(1);
                if after.is_empty() {
                    break;
                }
                if count >= MOST_OBJECTS {
                    gaps.push(format!("{}: there are more than {MOST_OBJECTS}", list.what));
                    return Ok(gaps);
                }
                next = after;
            }
        }
        Ok(gaps)
    }
}

/// What lists of tables have in common.
fn table_of() -> List<'static> {
    List { what: "", api: "", plural: "", query: "includeObject=Metadata", accept: TABLE, page: PAGE }
}

fn continued(next: &str) -> String {
    if next.is_empty() { String::new() } else { format!("continue={}", escape(next)) }
}

fn text(status: &Status) -> String {
    status.message().to_owned()
}

fn refused(what: &str, status: i32, body: &[u8]) -> String {
    format!("{what}: the API server answered {status}: {}", table::message(body))
}

/// Returns which cell of rows has a column.
fn column(page: &Page, name: &str) -> Option<usize> {
    page.columns.iter().find_map(|column| match column.source {
        table::Source::Cell(cell) if column.name == name => Some(cell),
        _ => None,
    })
}

fn workloads<'p>(resource: &str, page: &'p Page) -> impl Iterator<Item = Workload> + use<'p> {
    let resource = WORKLOADS.iter().find(|(what, _)| *what == resource).map_or("", |(what, _)| *what);
    let images = column(page, "Images");
    page.rows.iter().map(move |row| Workload {
        resource,
        namespace: row.namespace.clone(),
        name: row.name.clone(),
        labels: inventory::labels(&row.labels),
        images: inventory::images(images.and_then(|cell| row.cells.get(cell)).map_or("", String::as_str)),
    })
}

/// For fuzzing: a page of workloads, of Services, or of Helm's Secrets. No panic; every component is one of
/// the rules in a namespace of the page, its texts are short, and its Service is one.
#[cfg(feature = "fuzzing")]
pub fn fuzz(bytes: &[u8]) {
    let are_plain = |told: &[Told], most: usize| {
        let is_plain = |text: &str| text.len() <= 253 && !text.contains(char::is_control);
        let all = told.iter().flat_map(|told| [&told.instance, &told.name, &told.version, &told.status]);
        assert!(told.len() <= most && all.into_iter().all(|text| is_plain(text)), "{told:?}");
        assert!(told.iter().all(|told| !told.instance.is_empty()), "{told:?}");
    };
    static RULES: std::sync::LazyLock<Rules> =
        std::sync::LazyLock::new(|| super::rules(&[]).unwrap_or_default());
    if let Ok(page) = table::page(Form::Table, bytes) {
        let inventory = Inventory {
            workloads: workloads("deployments.apps", &page).collect(),
            services: of_services(&page).collect(),
            ..Inventory::default()
        };
        let found = RULES.find(&inventory);
        for component in &found.components {
            assert!(page.rows.iter().any(|row| row.namespace == component.namespace), "{component:?}");
            assert!(component.version.len() <= 128 && component.workloads.len() <= 20, "{component:?}");
            let service = component.service.parse::<::fleet::ServiceAddress>();
            assert!(component.service.is_empty() || service.is_ok(), "{component:?}");
        }
        assert!(found.probes.iter().all(|(index, _)| *index < found.components.len()));
        let told = applications::of_labels(&inventory);
        are_plain(&told, page.rows.len());
    }
    if let Ok(page) = table::page(Form::Metadata, bytes) {
        let secrets = page.rows.iter().map(|row| (row.namespace.as_str(), inventory::labels(&row.labels)));
        are_plain(&applications::of_helm(secrets), page.rows.len());
    }
}

fn of_services(page: &Page) -> impl Iterator<Item = Service> + use<'_> {
    let (address, ports) = (column(page, "Cluster-IP"), column(page, "Port(s)"));
    page.rows.iter().map(move |row| {
        let cell = |cell: Option<usize>| cell.and_then(|cell| row.cells.get(cell)).map_or("", String::as_str);
        Service {
            namespace: row.namespace.clone(),
            name: row.name.clone(),
            labels: inventory::labels(&row.labels),
            is_headless: cell(address) == "None",
            ports: inventory::ports(cell(ports)),
        }
    })
}
