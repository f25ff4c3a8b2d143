//! The metadata of a request on the API listener: what is read and removed here, what is passed on to the
//! agent, and what no caller may send.

use grpc::{Code, Deadline, Status, format_timeout};
use http::{HeaderMap, HeaderValue, Uri};
use ids::{AgentId, ConnectionId};
use tunnel::meta::{self, Binary, MapWriter};

use observe::refusals::{ListenerName, Reason, Refusals};

/// Names the agent.
pub const AGENT_ID: &str = "kas-agent-id";
/// Names one connection of it.
pub const CONNECTION_ID: &str = "kas-connection-id";
/// Asks for the steps of the request on its way.
pub const EXPLAIN: &str = "kas-explain";
/// Feature flags that GitLab sends with each call.
const FEATURE: &str = "kas-feature-";
/// The maximum number of feature flags in a request.
const MAX_FEATURES: usize = 64;

/// Where a request is to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// The agent.
    pub agent: AgentId,
    /// One connection of it, or any.
    pub connection: Option<ConnectionId>,
    /// Whether the caller asks for the steps of the request.
    pub explain: bool,
}

impl Target {
    /// Reads the keys that begin with `kas-`, and refuses those that no caller may send. `None`: no agent is
    /// named.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` with the key and what is expected.
    pub fn read(headers: &HeaderMap) -> Result<Option<Self>, Status> {
        check_keys(headers)?;
        let connection = match single(headers, CONNECTION_ID)? {
            None | Some("0") => None,
            Some(text) => Some(text.parse().map_err(|error| invalid(format!("{CONNECTION_ID}: {error}")))?),
        };
        let Some(agent) = single(headers, AGENT_ID)? else {
            return match connection {
                None => Ok(None),
                Some(_) => Err(invalid(format!("{CONNECTION_ID} needs {AGENT_ID} beside it"))),
            };
        };
        let agent = agent.parse().map_err(|error| invalid(format!("{AGENT_ID}: {error}")))?;
        let explain = match single(headers, EXPLAIN)? {
            None | Some("0" | "false") => false,
            Some("1" | "true") => true,
            Some(_) => return Err(invalid(format!("{EXPLAIN} must be 1 or 0"))),
        };
        Ok(Some(Self { agent, connection, explain }))
    }
}

/// Refuses keys that begin with `kas-` and that no caller may send, and too many feature flags. This applies
/// to every method, including those of kas itself.
///
/// # Errors
/// `INVALID_ARGUMENT` with the key, see [`has_too_many`].
pub fn check_keys(headers: &HeaderMap) -> Result<(), Status> {
    let mut features = 0;
    for key in headers.keys() {
        match key.as_str() {
            AGENT_ID | CONNECTION_ID | EXPLAIN => {}
            key if key.starts_with(FEATURE) => features += 1,
            key if key.starts_with("kas-") => {
                return Err(invalid(format!(
                    "metadata key {key} is reserved: keys that begin with kas- belong to kas"
                )));
            }
            _ => {}
        }
    }
    if features > MAX_FEATURES {
        return Err(invalid(format!("at most {MAX_FEATURES} {FEATURE}* keys are accepted, got {features}")));
    }
    Ok(())
}

/// Whether a request that was refused exceeds the limit of feature flags. Else one of its keys is wrong.
pub fn has_too_many(headers: &HeaderMap) -> bool {
    headers.keys().filter(|key| key.as_str().starts_with(FEATURE)).count() > MAX_FEATURES
}

fn single<'a>(headers: &'a HeaderMap, key: &str) -> Result<Option<&'a str>, Status> {
    let mut values = headers.get_all(key).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(invalid(format!("{key} must have exactly one value")));
    }
    value.to_str().map(Some).map_err(|_| invalid(format!("{key} is not text")))
}

fn invalid(message: String) -> Status {
    Status::new(Code::InvalidArgument, message)
}

/// Whether a key of the caller is passed on to the agent.
fn passes(key: &str) -> bool {
    !(key.starts_with("kas-") || key.starts_with("grpc-") || key.starts_with(':') || meta::is_hop_level(key))
}

/// Writes the `RequestInfo` of a request: the method, the metadata of the caller that is passed on, the time
/// until the deadline, and the request id.
///
/// # Errors
/// [`meta::Error`] for metadata that cannot be sent to this agent, see [`untransferable`].
pub fn request_info(
    method: &str,
    headers: &HeaderMap,
    deadline: Deadline,
    correlation: &HeaderValue,
    binary: Binary,
) -> Result<MapWriter, meta::Error> {
    let mut writer = MapWriter::request_info(method, binary);
    for key in headers.keys() {
        if passes(key.as_str()) && *key != grpc::CORRELATION_ID {
            writer.add_all(key, headers)?;
        }
    }
    writer.add_text(grpc::CORRELATION_ID.as_str(), correlation.to_str().unwrap_or_default())?;
    if let Some(remaining) = deadline.remaining() {
        writer.add_text("grpc-timeout", &format_timeout(remaining))?;
    }
    Ok(writer)
}

/// Returns `INVALID_ARGUMENT` for metadata that cannot be sent to an agent. Counts the refusal if the
/// metadata is too large.
pub fn untransferable(error: &meta::Error, refusals: &Refusals, listener: ListenerName) -> Status {
    if matches!(error, meta::Error::TooMuch) {
        refusals.refused(listener, Reason::Headers);
    }
    invalid(error.to_string())
}

/// Returns the metadata of a request for a replica of GitLab's kas, which creates the `RequestInfo` from it:
/// the metadata of the caller that is passed on, and the request id. The sender adds the deadline.
pub fn to_gateway(headers: &HeaderMap, correlation: &HeaderValue) -> HeaderMap {
    let mut map = HeaderMap::with_capacity(headers.len() + 1);
    for (key, value) in headers {
        if passes(key.as_str()) && *key != grpc::CORRELATION_ID {
            map.append(key.clone(), value.clone());
        }
    }
    map.insert(grpc::CORRELATION_ID, correlation.clone());
    map
}

/// Returns the request id of the caller if it is legal, else a new one of 32 hexadecimal digits.
///
/// It is marked as sensitive to keep it out of HPACK's tables: no other request has it, and it would displace
/// a value that is repeated.
pub fn correlation(headers: &HeaderMap) -> HeaderValue {
    let mut value = correlation_of(headers);
    value.set_sensitive(true);
    value
}

fn correlation_of(headers: &HeaderMap) -> HeaderValue {
    if let Some(value) = headers.get(grpc::CORRELATION_ID)
        && (1..=128).contains(&value.len())
        && value.as_bytes().iter().all(|b| b.is_ascii_graphic())
    {
        return value.clone();
    }
    let mut id = [0; 32];
    hex::encode_to_slice(rand::random::<[u8; 16]>(), &mut id).expect("32 digits for 16 bytes");
    HeaderValue::from_bytes(&id).expect("hexadecimal digits are a legal header value")
}

/// Whether a path is a full method, `/package.Service/Method`, of at most 512 bytes.
pub fn is_method(uri: &Uri) -> bool {
    let path = uri.path();
    path.len() <= 512
        && path.strip_prefix('/').and_then(|p| p.split_once('/')).is_some_and(|(service, method)| {
            !service.is_empty()
                && !method.is_empty()
                && path.bytes().skip(1).filter(|b| *b == b'/').count() == 1
                && path.bytes().all(|b| b.is_ascii_graphic())
        })
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use proto::gitlab::agent::reverse_tunnel::rpc::RequestInfo;

    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (key, value) in pairs {
            map.append(*key, HeaderValue::from_static(value));
        }
        map
    }

    #[test]
    fn target_is_read_and_reserved_keys_are_refused_by_name() {
        let read = |pairs: &[(&'static str, &'static str)]| {
            Target::read(&headers(pairs)).map_err(|s| s.message().to_owned())
        };
        assert_eq!(read(&[]), Ok(None));
        let target = read(&[("kas-agent-id", "3"), ("kas-connection-id", "9"), ("kas-feature-x", "true")]);
        assert_eq!(
            target,
            Ok(Some(Target {
                agent: "3".parse().unwrap(),
                connection: Some("9".parse().unwrap()),
                explain: false
            }))
        );
        for (pairs, part) in [
            (&[("kas-agent-id", "0")][..], "kas-agent-id: expected a whole number"),
            (&[("kas-agent-id", "1"), ("kas-agent-id", "2")], "exactly one value"),
            (&[("kas-hop-routing-agent-id", "1")], "kas-hop-routing-agent-id is reserved"),
            (&[("kas-anything", "1")], "kas-anything is reserved"),
            (&[("kas-connection-id", "5")], "needs kas-agent-id"),
            (&[("kas-agent-id", "1"), ("kas-explain", "yes")], "kas-explain must be 1 or 0"),
        ] {
            assert!(read(pairs).unwrap_err().contains(part), "{pairs:?}");
        }
    }

    #[test]
    fn too_many_feature_flags_are_refused() {
        let mut map = HeaderMap::new();
        for i in 0..=MAX_FEATURES {
            map.insert(
                http::HeaderName::try_from(format!("kas-feature-{i}")).unwrap(),
                HeaderValue::from_static("true"),
            );
        }
        assert_eq!(Target::read(&map).unwrap_err().code(), Code::InvalidArgument);
    }

    #[test]
    fn credentials_and_hop_level_keys_never_reach_the_agent() {
        let map = headers(&[
            ("authorization", "Bearer secret"),
            ("cookie", "secret"),
            ("kas-agent-id", "1"),
            ("kas-feature-a", "true"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "x"),
            ("grpc-encoding", "gzip"),
            ("grpc-timeout", "5S"),
            ("proxy-authorization", "secret"),
            ("traceparent", "00-1"),
            ("app", "1"),
            ("app", "2"),
            ("x-gitlab-correlation-id", "callers"),
        ]);
        let correlation = correlation(&map);
        let deadline = Deadline::after(std::time::Duration::from_secs(5));
        let body = request_info("/s/M", &map, deadline, &correlation, Binary::Base64).unwrap().into_body();
        assert!(!body.windows(6).any(|w| w == b"secret"));
        let info = RequestInfo::decode(body).unwrap();
        assert_eq!(
            info.meta.keys().map(String::as_str).collect::<Vec<_>>(),
            ["app", "grpc-timeout", "traceparent", "x-gitlab-correlation-id"]
        );
        assert_eq!(info.meta["app"].value, ["1", "2"]);
        assert_eq!(info.meta["x-gitlab-correlation-id"].value, ["callers"]);
        let map = to_gateway(&map, &correlation);
        let mut keys: Vec<_> = map.keys().map(http::HeaderName::as_str).collect();
        keys.sort_unstable();
        assert_eq!(keys, ["app", "traceparent", "x-gitlab-correlation-id"]);
        assert_eq!(map.get_all("app").iter().collect::<Vec<_>>(), ["1", "2"]);
    }

    #[test]
    fn legal_request_ids_are_kept_and_others_are_replaced() {
        assert_eq!(correlation(&headers(&[("x-gitlab-correlation-id", "abc")])), "abc");
        for bad in ["", "a b"] {
            let mut map = HeaderMap::new();
            map.insert(grpc::CORRELATION_ID, HeaderValue::from_str(bad).unwrap());
            assert_eq!(correlation(&map).len(), 32);
        }
    }

    #[test]
    fn only_full_methods_are_methods() {
        for (path, good) in [
            ("/a.B/C", true),
            ("/a.B/", false),
            ("//C", false),
            ("/a", false),
            ("/a/b/c", false),
            ("/", false),
        ] {
            assert_eq!(is_method(&path.parse().unwrap()), good, "{path}");
        }
    }
}
