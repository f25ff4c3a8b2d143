//! Which user a request impersonates.

use prost::Message as _;
use proto::gitlab::agent::{grpctool::http_request, kubernetes_api::rpc::HeaderExtra};

use crate::HEADER_EXTRA;

/// The most characters of a name. Longer names are truncated.
const LONGEST: usize = 128;

/// Returns the user that a request impersonates: by `HeaderExtra`, as GitLab does, or by the header
/// `Impersonate-User`. A request with both is rejected.
pub fn impersonated_user(header: &http_request::Header) -> Option<String> {
    let by_header = || {
        let headers = header.request.iter().flat_map(|request| &request.header);
        let found = headers.into_iter().find(|(name, _)| name.eq_ignore_ascii_case("impersonate-user"));
        found.and_then(|(_, values)| values.value.first()).map(|user| truncated(user))
    };
    header.extra.as_ref().and_then(by_extra).or_else(by_header)
}

/// Returns the user in `HeaderExtra`. An `extra` of another type is rejected elsewhere.
fn by_extra(extra: &prost_types::Any) -> Option<String> {
    let is_known = extra.type_url == HEADER_EXTRA;
    let extra = is_known.then(|| HeaderExtra::decode(extra.value.as_ref()).ok())??;
    extra.imp_config.map(|config| truncated(&config.username)).filter(|user| !user.is_empty())
}

fn truncated(text: &str) -> String {
    text.chars().take(LONGEST).collect()
}
