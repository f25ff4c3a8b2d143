//! Section `sinks`.

use std::{collections::HashSet, path::PathBuf};

use ::sinks::{Allowed, Kind, Network};
use fleet::Selector;
use http::Uri;
use settings::walk::Section;

use super::redis::Redis;

/// The most sinks.
const MOST: usize = 50;
/// The most networks of a list.
const MOST_NETWORKS: usize = 1_000;
/// The longest name.
const LONGEST_NAME: usize = 63;
/// The default of what waits for a sink, and the most: items, and their bytes.
const ITEMS: u32 = 10_000;
const BYTES: u32 = 16 << 20;
/// The least bytes: the largest item must fit.
const LEAST_BYTES: u32 = 128 << 10;
/// The default length of a stream.
const STREAM: u32 = 100_000;

/// Section `sinks`: where news of the fleet goes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sinks {
    /// Which addresses webhooks may be sent to.
    pub allowed: Allowed,
    /// The sinks.
    pub targets: Vec<Sink>,
    /// Redis, if a sink needs it.
    pub redis: Option<Box<Redis>>,
}

impl Sinks {
    /// Whether a sink needs Redis.
    pub fn need_redis(&self) -> bool {
        self.targets.iter().any(|sink| matches!(sink.target, SinkTarget::Redis(_)))
    }
}

/// A sink.
#[derive(Debug, Clone, PartialEq)]
pub struct Sink {
    /// Its name; unique.
    pub name: String,
    /// Of which agents it gets news.
    pub agents: Selector,
    /// Which news; at least one kind.
    pub news: Vec<Kind>,
    /// Where it is sent.
    pub target: SinkTarget,
    /// Items that may wait for it.
    pub items: u32,
    /// Their bytes.
    pub bytes: u32,
}

/// Where a sink sends.
#[derive(Debug, Clone, PartialEq)]
pub enum SinkTarget {
    /// As requests to a URL.
    Webhook(Webhook),
    /// To Redis.
    Redis(RedisForm),
    /// Into the log of kas.
    Log,
}

/// A URL that gets news.
#[derive(Debug, Clone, PartialEq)]
pub struct Webhook {
    /// Its scheme is http or https, and it has a host.
    pub url: Uri,
    /// The file of a bearer token.
    pub token_file: Option<PathBuf>,
    /// The authority that signed its certificate, beside those of the system.
    pub ca: Option<PathBuf>,
}

/// How news goes to Redis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RedisForm {
    /// Published on a channel for each agent.
    Publish,
    /// Added to a stream for the sink, of about this length.
    Stream(u32),
}

/// Declares the section.
pub(super) fn read(root: &mut Section<'_, '_>) -> Sinks {
    let doc = "Sinks: news of agents for other programs, as CloudEvents. Give all replicas the same section.";
    root.section("sinks", doc, |s| {
        let deny = "Networks that webhooks are not sent to, such as 10.0.0.0/8. Loopback and link-local addresses, such as \
                    the metadata service of a cloud, are refused without being listed.";
        let deny = networks(s, "deny", deny);
        let allow = "Networks that webhooks may be sent to although they are on loopback, link-local or in deny.";
        let allow = networks(s, "allow", allow);
        let doc = "The sinks. Each is {name, agents, news, webhook} or one with redis or log instead of webhook. name: \
                   unique; a part of metrics and keys. agents: whose news: all, or id=7|9, project=3, name=prod-*, \
                   labels of kas.yaml such as env=prod, joined by commas. news: events (of the Kubernetes API), agents \
                   (that come and go), syncs (that fail and recover). webhook: {url, token_file, ca_certificate_file}; \
                   token_file has a bearer token. redis: publish (on the channel <redis.key_prefix>:kas:agent:<id>) or \
                   stream (<redis.key_prefix>:kas:sink:<name>, of about stream_length items, default 100000); the \
                   section redis says where. log: true writes into the log of kas. buffer: {items, bytes}, what may \
                   wait for the sink, at most and by default 10000 and 16777216.";
        let mut names = HashSet::new();
        let targets = s.items("targets", doc, |s, _| {
            let sink = sink(s);
            if let Some(sink) = &sink
                && !names.insert(sink.name.clone())
            {
                s.refuse("name", "a name that no sink above has");
            }
            sink
        });
        if targets.len() > MOST {
            s.refuse_as("targets", format!("{} sinks", targets.len()), format!("at most {MOST}"));
        }
        let targets = targets.into_iter().flatten().collect();
        Sinks { allowed: Allowed { deny, allow }, targets, redis: None }
    })
}

fn networks(s: &mut Section<'_, '_>, key: &'static str, doc: &str) -> Vec<Network> {
    let texts = s.texts(key, &[], doc);
    if texts.len() > MOST_NETWORKS {
        s.refuse_as(key, format!("{} networks", texts.len()), format!("at most {MOST_NETWORKS}"));
        return Vec::new();
    }
    let mut networks = Vec::with_capacity(texts.len());
    for (i, text) in texts.iter().enumerate() {
        match text.parse() {
            Ok(network) => networks.push(network),
            Err(::sinks::InvalidNetwork) => s.refuse_as(
                &format!("{key}[{i}]"),
                format!("{text:?}"),
                "an address or a range such as 10.0.0.0/8 or fd00::/8, without bits beyond its prefix",
            ),
        }
    }
    networks
}

fn is_name(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=LONGEST_NAME).contains(&text.len())
        && text.bytes().all(is_inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Reads a sink. `None`: something is wrong with it.
fn sink(s: &mut Section<'_, '_>) -> Option<Sink> {
    let name = s.required("name", "", "the name of the sink", "");
    if !name.is_empty() && !is_name(&name) {
        s.refuse(
            "name",
            "lower-case letters, digits and `-`, at most 63, beginning and ending with none of `-`",
        );
    }
    let all = "all, or id=7|9, project=3, name=prod-*, labels of kas.yaml such as env=prod, joined by commas";
    let agents = s.required("agents", "", all, "");
    let agents: Option<Selector> = match agents.parse() {
        Ok(selector) => Some(selector),
        Err(_) if agents.is_empty() => None,
        Err(error) => {
            s.refuse("agents", format!("{all}; {error}"));
            None
        }
    };
    let kinds = "at least one of events, agents and syncs";
    let mut news = Vec::new();
    for (i, text) in s.required_texts("news", &[], kinds, "").iter().enumerate() {
        match Kind::ALL.iter().find(|(name, _)| name == text) {
            Some((_, kind)) if !news.contains(kind) => news.push(*kind),
            Some(_) => s.refuse_as(&format!("news[{i}]"), format!("{text:?} twice"), kinds),
            None => s.refuse_as(&format!("news[{i}]"), format!("{text:?}"), "events, agents or syncs"),
        }
    }
    let ways = ["webhook", "redis", "log"].into_iter().filter(|way| s.has(way)).count();
    let has_length = s.has("stream_length");
    let webhook = if s.has("webhook") { Some(s.section("webhook", "", webhook)) } else { None };
    let form = s.optional_text("redis", "", "");
    let length = s.number_within("stream_length", STREAM, 1..=100_000_000, "");
    let is_log = s.flag("log", "");
    let (items, bytes) = s.section("buffer", "", |s| {
        let items = s.number_within("items", ITEMS, 1..=ITEMS, "");
        (items, s.number_within("bytes", BYTES, LEAST_BYTES..=BYTES, ""))
    });
    if has_length && form.as_deref() != Some("stream") {
        s.refuse("stream_length", "nothing: it is for redis: stream");
    }
    let target = match (ways, webhook, form.as_deref(), is_log) {
        (1, Some(webhook), None, false) => webhook.map(SinkTarget::Webhook),
        (1, None, Some("publish"), false) => Some(SinkTarget::Redis(RedisForm::Publish)),
        (1, None, Some("stream"), false) => Some(SinkTarget::Redis(RedisForm::Stream(length))),
        (1, None, Some(_), false) => {
            s.refuse("redis", "publish or stream");
            None
        }
        (1, None, None, true) => Some(SinkTarget::Log),
        (1, None, None, false) => {
            if !s.is_refused("log") && !s.is_refused("redis") {
                s.refuse("log", "true, or webhook or redis instead");
            }
            None
        }
        _ => {
            s.refuse_as("webhook", format!("{ways} of the three"), "exactly one of webhook, redis and log");
            None
        }
    };
    Some(Sink { name, agents: agents?, news, target: target?, items, bytes })
}

/// Reads a webhook. `None`: something is wrong with it.
fn webhook(s: &mut Section<'_, '_>) -> Option<Webhook> {
    let text = s.required("url", "", "where news is sent, such as https://example.com/kas", "");
    let token_file = s.path("token_file", "");
    let ca = s.path("ca_certificate_file", "");
    if text.is_empty() {
        return None;
    }
    let expected = "http:// or https:// with a host, without a user and without `#`";
    let url: Option<Uri> = text.parse().ok().filter(|url: &Uri| {
        let is_http = matches!(url.scheme_str(), Some("http" | "https"));
        let authority = url.authority().filter(|authority| !authority.as_str().contains('@'));
        is_http && authority.is_some_and(|it| !it.host().is_empty()) && !text.contains('#')
    });
    match &url {
        // It may have a password, and with many services the path is a secret.
        None => s.refuse_as("url", "something else (not shown, because it may be a secret)", expected),
        Some(url) if url.scheme_str() == Some("http") => {
            let text = "uses http: news, and the token if there is one, travel in plain text; use https beyond this host";
            s.warn("url", text);
        }
        Some(_) => {}
    }
    Some(Webhook { url: url?, token_file, ca })
}
