//! Origins of web pages, as browsers send them.

use http::Uri;

/// Returns the origin of a URL in lower case and without the default port. `None`: it is not an http or https
/// URL, or has a user name.
pub(super) fn origin_of(url: &Uri) -> Option<String> {
    let (scheme, authority) = (url.scheme_str()?, url.authority()?);
    let default_port = match scheme {
        "https" => 443,
        "http" => 80,
        _ => return None,
    };
    let ends_with_port = authority.as_str() == authority.host() || authority.port_u16().is_some();
    if !ends_with_port || authority.as_str().contains('@') || authority.host().is_empty() {
        return None;
    }
    let host = authority.host().to_ascii_lowercase();
    Some(match authority.port_u16().filter(|port| *port != default_port) {
        Some(port) => format!("{scheme}://{host}:{port}"),
        None => format!("{scheme}://{host}"),
    })
}
