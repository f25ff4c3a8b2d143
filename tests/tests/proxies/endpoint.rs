//! nginx, HAProxy and Envoy in front of the endpoint for kubectl, with HTTP/1.1 and HTTP/2 from the client.
//!
//! First with what each does by default: what breaks is what docs/proxies.md says. Then with the
//! configuration that it shows, which is read from there: everything works. kas, agentk and the balancers are
//! real. The API server behind agentk is [played by the test](crate::exchange), because only so can a test
//! tell whether something that was sent is held back on the way.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use http::StatusCode;
use serde_json::json;
use testkit::{
    agentk::Agentk,
    endpoint,
    kas::token,
    process::SOON,
    proxy::{Balancer, Passes, Proxy},
};
use tokio::task::JoinSet;

use crate::{
    HAPROXY,
    exchange::{
        Answer, ApiServer, Asked, Connecting, Protocol, Served, Upgraded, ask_for_upgrade, head_of, within,
        within_time,
    },
};

const WATCH: &str = "/api/v1/namespaces/a/pods?watch=true";
const FOLLOW: &str = "/api/v1/namespaces/a/pods/b/log?follow=true";
/// A stream of a service of the cluster. kas does not know whether its response is one.
const SERVICE: &str = "/api/v1/namespaces/a/services/web:80/proxy/events";
/// What kubectl asks to be upgraded.
const EXEC: &str = "/api/v1/namespaces/a/pods/b/exec?command=sh";

/// The protocols of upgraded connections.
const UPGRADES: [&str; 2] = ["websocket", "SPDY/3.1"];

const MIB: usize = 1024 * 1024;

/// A kas with the endpoint, and an agentk whose API server is the test.
struct Endpoint {
    address: SocketAddr,
    api_server: ApiServer,
    _served: endpoint::Endpoint,
    _agentk: Agentk,
}

impl Endpoint {
    async fn start() -> Result<Self> {
        let served = endpoint::Endpoint::start(json!({})).await?;
        let api_server = ApiServer::start().await?;
        let agentk = Agentk::start_with(served.kas.agent, &token(1), &api_server.url()?).await?;
        agentk.connected().await?;
        Ok(Self { address: served.address, api_server, _served: served, _agentk: agentk })
    }
}

/// Checks that a client saw that a response was cut, or did not see it where docs/proxies.md says so.
fn check_cut(balancer: Balancer, protocol: Protocol, is_seen: bool) -> Result<()> {
    let is_hidden = balancer == Balancer::Haproxy && protocol == Protocol::Http2;
    ensure!(is_hidden || is_seen, "the client takes a part of a response for the whole");
    ensure!(!is_hidden || !is_seen, "this HAProxy tells clients of a cut: correct docs/proxies.md");
    Ok(())
}

/// The configuration of the balancers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Config {
    /// Only where kas is; for HAProxy the timers of Debian's package.
    Default,
    /// That of docs/proxies.md.
    Documented,
    /// The same, but with timers of one second.
    Short,
}

impl Config {
    async fn start(self, balancer: Balancer, kas: SocketAddr) -> Result<Proxy> {
        match (self, balancer) {
            (Self::Default, Balancer::Nginx) => Proxy::nginx(kas, Passes::Http, "").await,
            (Self::Default, Balancer::Haproxy) => Proxy::haproxy(kas, Passes::Http, HAPROXY).await,
            (Self::Default, Balancer::Envoy) => Proxy::envoy(kas, Passes::Http, json!({}), json!({})).await,
            (Self::Documented, _) => Proxy::for_kubectl(balancer, kas, None, None).await,
            (Self::Short, _) => Proxy::for_kubectl(balancer, kas, Some("1s"), None).await,
        }
    }

    /// Starts all three.
    async fn all(self, kas: SocketAddr) -> Result<[(Balancer, Proxy); 3]> {
        let [nginx, haproxy, envoy] = Balancer::ALL.map(|balancer| Box::pin(self.start(balancer, kas)));
        let (nginx, haproxy, envoy) = tokio::try_join!(nginx, haproxy, envoy)?;
        Ok([(Balancer::Nginx, nginx), (Balancer::Haproxy, haproxy), (Balancer::Envoy, envoy)])
    }
}

/// A client behind a balancer, and the API server at the other end.
#[derive(Clone, Copy)]
struct Way<'a> {
    balancer: Balancer,
    proxy: &'a Proxy,
    protocol: Protocol,
    api_server: &'a ApiServer,
}

impl Way<'_> {
    /// A short request. Its path is sent on as it is: decoded, it would be another one.
    async fn get(self) -> Result<()> {
        let target = "/api/v1/namespaces/a/services/https:web:443/proxy/x%2Fy//z%20?q=a%2Bb";
        let pending = Asked::get(target).send(self.proxy, self.protocol);
        self.api_server.next("GET", target).await?.whole("200 OK", "{}").await?;
        let answer = pending.answer().await?;
        ensure!(answer.status() == StatusCode::OK, "{:?}", answer.head);
        let body = answer.rest().await?;
        ensure!(body == b"{}", "{body:?}");
        Ok(())
    }

    /// A request from a page of the host itself: Python's client says that for each WebSocket. Returns the
    /// status.
    async fn get_from_own_host(self, is_passed: bool) -> Result<StatusCode> {
        let asked = Asked::get("/api/v1/namespaces/a/pods").with_own_origin(self.proxy, self.protocol);
        let pending = asked.send(self.proxy, self.protocol);
        if is_passed {
            let served = self.api_server.next("GET", "/api/v1/namespaces/a/pods").await?;
            served.whole("200 OK", "{}").await?;
        }
        Ok(pending.answer().await?.status())
    }

    /// An upload of twice `half` bytes. `is_streamed`: its first half arrives before the second is sent;
    /// otherwise it does not begin to arrive by then.
    async fn post(self, half: usize, is_streamed: bool) -> Result<()> {
        let target = "/api/v1/namespaces/a/configmaps";
        let [first, second] = [vec![b'1'; half], vec![b'2'; half]];
        let (asked, parts) = Asked::post(target, 2 * half);
        let pending = asked.send(self.proxy, self.protocol);
        parts.send(Bytes::from(first.clone())).await.context("it is sent")?;
        let mut served = None;
        if is_streamed {
            let mut begun = self.api_server.next("POST", target).await?;
            ensure!(begun.upload(half).await? == first, "the first half is another one");
            served = Some(begun);
        } else {
            // This checks that the next request there is its own.
            self.get().await?;
        }
        parts.send(Bytes::from(second.clone())).await.context("it is sent")?;
        drop(parts);
        let mut served = match served {
            Some(served) => served,
            None => {
                let mut served = self.api_server.next("POST", target).await?;
                ensure!(served.upload(half).await? == first, "the first half is another one");
                served
            }
        };
        ensure!(served.upload(half).await? == second, "the second half is another one");
        served.whole("201 Created", "{}").await?;
        let answer = pending.answer().await?;
        ensure!(answer.status() == StatusCode::CREATED, "{:?}", answer.head);
        let body = answer.rest().await?;
        ensure!(body == b"{}", "{body:?}");
        Ok(())
    }

    /// Begins a response without a length.
    async fn begin(self, target: &str) -> Result<(Served, Answer)> {
        let pending = Asked::get(target).send(self.proxy, self.protocol);
        let mut served = self.api_server.next("GET", target).await?;
        served.begin("application/json").await?;
        // The head arrives before there is anything else.
        let answer = pending.answer().await?;
        ensure!(answer.status() == StatusCode::OK, "{:?}", answer.head);
        Ok((served, answer))
    }

    /// The parts of a response arrive one by one: each is sent only after the one before has arrived.
    async fn streams(self, target: &str) -> Result<()> {
        let (mut served, mut answer) = self.begin(target).await?;
        for n in 0..3 {
            let event = event(n);
            served.part(event.as_bytes()).await?;
            answer.reads(event.as_bytes()).await?;
        }
        served.end().await?;
        let rest = answer.rest().await?;
        ensure!(rest.is_empty(), "{rest:?}");
        Ok(())
    }

    /// A response that the API server breaks off ends, and is not taken for a whole one.
    async fn breaks(self, target: &str) -> Result<()> {
        let (mut served, mut answer) = self.begin(target).await?;
        served.part(b"{\"type\":").await?;
        answer.reads(b"{\"type\":").await?;
        drop(served);
        check_cut(self.balancer, self.protocol, answer.shows_cut(SOON).await?)
    }

    /// Nothing of a response arrives before it is complete, although other requests are answered.
    async fn holds_back(self, target: &str) -> Result<()> {
        let mut pending = Asked::get(target).send(self.proxy, self.protocol);
        let mut served = self.api_server.next("GET", target).await?;
        served.begin("text/event-stream").await?;
        served.part(event(0).as_bytes()).await?;
        for _ in 0..5 {
            self.get().await?;
        }
        // In HTTP/2, nginx sends the head at once.
        let mut answer = pending.answer_now()?;
        ensure!(!answer.as_mut().is_some_and(Answer::has_come), "a part has arrived");
        served.part(event(1).as_bytes()).await?;
        served.end().await?;
        let answer = match answer {
            Some(answer) => answer,
            None => pending.answer().await?,
        };
        let body = answer.rest().await?;
        ensure!(body == (event(0) + &event(1)).into_bytes(), "{:?}", String::from_utf8_lossy(&body));
        Ok(())
    }

    /// Everything but upgrades.
    async fn serves(self) -> Result<()> {
        self.get().await?;
        let status = self.get_from_own_host(true).await?;
        ensure!(status == StatusCode::OK, "{status}");
        self.post(MIB, true).await.context("POST")?;
        for target in [WATCH, FOLLOW, SERVICE] {
            self.streams(target).await.context(target)?;
        }
        for target in [WATCH, FOLLOW] {
            self.breaks(target).await.context(target)?;
        }
        Ok(())
    }
}

/// Returns an event of a watch.
fn event(n: usize) -> String {
    format!("{{\"type\":\"ADDED\",\"object\":{{\"n\":{n}}}}}\n")
}

/// Checks [`Way::serves`] with both protocols.
async fn serves(balancer: Balancer, proxy: &Proxy, api_server: &ApiServer) -> Result<()> {
    for protocol in Protocol::BOTH {
        let way = Way { balancer, proxy, protocol, api_server };
        way.serves().await.with_context(|| format!("{protocol:?}\n{}", proxy.process.log()))?;
    }
    Ok(())
}

/// Upgraded connections pass bytes in both directions, and their ends.
async fn upgrades(proxy: &Proxy, api_server: &ApiServer) -> Result<()> {
    let large: Vec<u8> = (0..MIB).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for token in UPGRADES {
        let check = async {
            let mut upgraded = Upgraded::open(proxy, api_server, token).await?;
            for n in 0..20 {
                upgraded.passes(&large[n..2 * n + 1]).await?;
            }
            upgraded.passes(&large).await?;
            upgraded.ends_at_api_server().await?;
            Upgraded::open(proxy, api_server, token).await?.ends_at_client().await
        };
        check.await.with_context(|| format!("{token}\n{}", proxy.process.log()))?;
    }
    Ok(())
}

#[tokio::test]
async fn by_default_nginx_streams_what_kas_marks_and_passes_no_upgrade() -> Result<()> {
    let Endpoint { address, api_server, .. } = &Endpoint::start().await?;
    let proxy = &Config::Default.start(Balancer::Nginx, *address).await?;
    for protocol in Protocol::BOTH {
        let way = Way { balancer: Balancer::Nginx, proxy, protocol, api_server };
        let check = async {
            way.get().await?;
            for target in [WATCH, FOLLOW] {
                way.streams(target).await.context(target)?;
                way.breaks(target).await.context(target)?;
            }
            // Of other responses it knows only by proxy_buffering off that they must not be held back.
            way.holds_back(SERVICE).await?;
            // An upload is stored first: proxy_request_buffering off.
            way.post(1024, false).await?;
            // client_max_body_size 0
            let (asked, _parts) = Asked::post("/api/v1/namespaces/a/configmaps", 2 * MIB);
            let status = asked.send(proxy, protocol).answer().await?.status();
            ensure!(status == StatusCode::PAYLOAD_TOO_LARGE, "{status}");
            // proxy_set_header Host: kas sees another host than the client.
            let status = way.get_from_own_host(false).await?;
            ensure!(status == StatusCode::FORBIDDEN, "{status}");
            anyhow::Ok(())
        };
        check.await.with_context(|| format!("{protocol:?}\n{}", proxy.process.log()))?;
    }
    // The API server sees a request for nothing.
    for (token, method) in UPGRADES.into_iter().zip(["GET", "POST"]) {
        let mut client = ask_for_upgrade(proxy, token, EXEC).await?;
        let served = api_server.next(method, EXEC).await?;
        ensure!(served.head.get("upgrade").is_none(), "{:?}", served.head);
        served.whole("400 Bad Request", "{}").await?;
        let head = head_of(&mut client).await?;
        ensure!(head.status()? == 400, "{head:?}");
    }
    Ok(())
}

/// Anything after the port lets nginx send the path that it has decoded.
#[tokio::test]
async fn nginx_decodes_paths_if_proxy_pass_has_one() -> Result<()> {
    let Endpoint { address, api_server, .. } = &Endpoint::start().await?;
    for (end, arrives) in [("", "x%2Fy//z"), ("/", "x/y/z")] {
        let proxy = Proxy::nginx_http(*address, "", &format!("proxy_pass http://{address}{end};")).await?;
        let path = "/api/v1/namespaces/a/services/web/proxy/";
        let _pending = Asked::get(&format!("{path}x%2Fy//z")).send(&proxy, Protocol::Http1);
        api_server.next("GET", &format!("{path}{arrives}")).await.with_context(|| proxy.process.log())?;
    }
    Ok(())
}

#[tokio::test]
async fn by_default_haproxy_streams_and_passes_upgrades() -> Result<()> {
    let Endpoint { address, api_server, .. } = &Endpoint::start().await?;
    let proxy = &Config::Default.start(Balancer::Haproxy, *address).await?;
    serves(Balancer::Haproxy, proxy, api_server).await?;
    upgrades(proxy, api_server).await
}

#[tokio::test]
async fn by_default_envoy_streams_and_refuses_upgrades() -> Result<()> {
    let Endpoint { address, api_server, .. } = &Endpoint::start().await?;
    let proxy = &Config::Default.start(Balancer::Envoy, *address).await?;
    serves(Balancer::Envoy, proxy, api_server).await?;
    for token in UPGRADES {
        // Nothing of it reaches the API server: the next request there is the one below.
        let head = head_of(&mut ask_for_upgrade(proxy, token, EXEC).await?).await?;
        ensure!(head.status()? == 403, "{head:?}");
    }
    Way { balancer: Balancer::Envoy, proxy, protocol: Protocol::Http1, api_server }.get().await
}

#[tokio::test]
async fn envoy_cuts_a_watch_by_the_timer_of_its_route_even_if_events_arrive() -> Result<()> {
    let Endpoint { address, api_server, .. } = &Endpoint::start().await?;
    let proxy = &Proxy::envoy(*address, Passes::Http, json!({}), json!({ "timeout": "1s" })).await?;
    let way = Way { balancer: Balancer::Envoy, proxy, protocol: Protocol::Http2, api_server };
    let (mut served, mut answer) = way.begin(WATCH).await?;
    let events = async {
        let event = event(1);
        loop {
            // The client is the first to notice.
            let _ = served.part(event.as_bytes()).await;
            if let Err(error) = answer.reads(event.as_bytes()).await {
                break error;
            }
        }
    };
    let error = within("the cut of a watch", events).await?;
    ensure!(error.is::<hyper::Error>(), "{error:?}");
    Ok(())
}

/// Checks everything through a balancer with the documented configuration.
async fn everything_works(balancer: Balancer) -> Result<()> {
    let Endpoint { address, api_server, .. } = &Endpoint::start().await?;
    let proxy = &Box::pin(Config::Documented.start(balancer, *address)).await?;
    serves(balancer, proxy, api_server).await?;
    upgrades(proxy, api_server).await
}

#[tokio::test]
async fn with_the_documented_configuration_everything_works_through_nginx() -> Result<()> {
    everything_works(Balancer::Nginx).await
}

#[tokio::test]
async fn with_the_documented_configuration_everything_works_through_haproxy() -> Result<()> {
    everything_works(Balancer::Haproxy).await
}

#[tokio::test]
async fn with_the_documented_configuration_everything_works_through_envoy() -> Result<()> {
    everything_works(Balancer::Envoy).await
}

/// Envoy makes extended CONNECT of each upgrade, and loses its method: SPDY stays POST, as kubectl sends it.
#[tokio::test]
async fn with_http2_to_kas_everything_works_through_envoy_too() -> Result<()> {
    let Endpoint { address, api_server, .. } = &Endpoint::start().await?;
    let passes = Passes::Http2;
    let proxy = Proxy::for_kubectl_by(Balancer::Envoy, passes, *address, None, None, json!({}));
    let proxy = &Box::pin(proxy).await?;
    serves(Balancer::Envoy, proxy, api_server).await?;
    upgrades(proxy, api_server).await
}

/// Clients that upgrade a stream of HTTP/2, by extended CONNECT (RFC 8441): which balancers let them, and
/// what becomes of it, as docs/proxies.md says.
#[tokio::test]
async fn extended_connect_works_where_the_documentation_says_so() -> Result<()> {
    let Endpoint { address, api_server, .. } = &Endpoint::start().await?;
    let [nginx, haproxy, envoy] = &Box::pin(Config::Documented.all(*address)).await?;
    for (balancer, proxy) in [nginx, envoy] {
        // Clients may not send what was not offered to them.
        let client = Connecting::start(proxy).await?;
        ensure!(!client.is_offered(), "{balancer:?} offers it: correct docs/proxies.md");
    }

    let haproxy = &haproxy.1;
    let mut client = Connecting::start(haproxy).await?;
    ensure!(client.is_offered(), "HAProxy does not offer it: correct docs/proxies.md");
    client.passes_websocket(api_server).await.with_context(|| haproxy.process.log())?;
    // The permission that a GET requires is another one than that of kubectl's POST.
    let spdy = client.asks_for_spdy_by_get(api_server).await;
    spdy.with_context(|| format!("SPDY\n{}", haproxy.process.log()))?;

    let one_more = Endpoint::start().await?;
    let connects = json!({ "http2_protocol_options": { "allow_connect": true } });
    // With HTTP/1.1 to kas, it would send the handshake without a key.
    let envoy = Proxy::for_kubectl_by(Balancer::Envoy, Passes::Http2, one_more.address, None, None, connects);
    let envoy = &Box::pin(envoy).await?;
    let mut client = Connecting::start(envoy).await?;
    ensure!(client.is_offered(), "Envoy does not offer it: correct docs/proxies.md");
    client.passes_websocket(&one_more.api_server).await.with_context(|| envoy.process.log())
}

/// Long requests of which a client sees nothing for a while.
struct Silent {
    balancer: Balancer,
    watches: Vec<(Protocol, Served, Answer)>,
    upgrades: Vec<Upgraded>,
    /// A log that the client has stopped reading, and the task that sends it.
    unread: (JoinSet<()>, Answer),
}

impl Silent {
    async fn begin(
        balancer: Balancer,
        proxy: &Proxy,
        api_server: &ApiServer,
        tokens: &[&str],
    ) -> Result<Self> {
        let way = |protocol| Way { balancer, proxy, protocol, api_server };
        let mut watches = Vec::new();
        for protocol in Protocol::BOTH {
            let (served, answer) = way(protocol).begin(WATCH).await?;
            watches.push((protocol, served, answer));
        }
        let mut upgrades = Vec::new();
        for token in tokens {
            upgrades.push(Upgraded::open(proxy, api_server, token).await?);
        }
        let (served, answer) = way(Protocol::Http1).begin(FOLLOW).await?;
        let mut pouring = JoinSet::new();
        pouring.spawn(served.pour());
        Ok(Self { balancer, watches, upgrades, unread: (pouring, answer) })
    }

    /// Waits until all of them were cut.
    async fn are_cut(self, limit: Duration) -> Result<()> {
        // The API server still serves a watch while its client waits for the cut.
        for (protocol, _served, answer) in self.watches {
            let is_seen = answer.shows_cut(limit).await.context("watch")?;
            check_cut(self.balancer, protocol, is_seen)?;
        }
        for upgraded in self.upgrades {
            upgraded.ends_early(limit).await.context("upgrade")?;
        }
        let (mut pouring, _answer) = self.unread;
        within_time("the API server sees that nobody reads", limit, pouring.join_next()).await?;
        Ok(())
    }

    /// Checks that none of them was.
    async fn go_on(self) -> Result<()> {
        for (_, mut served, mut answer) in self.watches {
            served.part(event(1).as_bytes()).await?;
            answer.reads(event(1).as_bytes()).await.context("watch")?;
        }
        for mut upgraded in self.upgrades {
            upgraded.passes(b"still there").await.context("upgrade")?;
        }
        let (mut pouring, mut answer) = self.unread;
        ensure!(pouring.try_join_next().is_none(), "the log was cut");
        // More than the client's end of the connection has already received.
        for _ in 0..8 {
            answer.reads(&vec![b'x'; MIB]).await.context("log")?;
        }
        Ok(())
    }
}

/// Begins silent requests through each balancer with this configuration, and through others with the
/// documented one. The first are cut, the others still work after that.
async fn only_documented_timers_are_long_enough(
    config: Config,
    upgrades: &[&str],
    limit: Duration,
) -> Result<()> {
    let (one, two) = tokio::try_join!(Box::pin(Endpoint::start()), Box::pin(Endpoint::start()))?;
    let (cutting, keeping) =
        tokio::try_join!(Box::pin(config.all(one.address)), Box::pin(Config::Documented.all(two.address)))?;
    let mut kept = Vec::new();
    for (balancer, proxy) in &keeping {
        let begun = Silent::begin(*balancer, proxy, &two.api_server, &UPGRADES).await;
        kept.push(begun.with_context(|| format!("{balancer:?}"))?);
    }
    let mut cut = Vec::new();
    for (balancer, proxy) in &cutting {
        let begun = Silent::begin(*balancer, proxy, &one.api_server, upgrades).await;
        cut.push(begun.with_context(|| format!("{balancer:?}"))?);
    }
    for silent in cut {
        let balancer = silent.balancer;
        silent.are_cut(limit).await.with_context(|| format!("{balancer:?}"))?;
    }
    for silent in kept {
        let balancer = silent.balancer;
        silent.go_on().await.with_context(|| format!("{balancer:?}"))?;
    }
    Ok(())
}

#[tokio::test]
async fn silent_requests_are_cut_by_timers_but_not_by_those_of_the_documented_configuration() -> Result<()> {
    only_documented_timers_are_long_enough(Config::Short, &UPGRADES, SOON).await
}

#[tokio::test]
#[ignore = "takes one minute"]
async fn default_timers_of_each_balancer_cut_silent_requests() -> Result<()> {
    // By default, two of them pass no upgrade.
    only_documented_timers_are_long_enough(Config::Default, &[], Duration::from_secs(100)).await
}
