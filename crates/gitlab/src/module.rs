//! Requests of modules of agents to GitLab, which kas passes on.

use http::{HeaderMap, HeaderName, Request, Response, header};
use hyper_util::client::legacy;

use crate::{Client, Failure, LookupError, Urgency, request_id};

/// The path of modules in every version.
const MODULES: &str = "/api/v4/internal/kubernetes/modules/";

/// Why a request of a module has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ModuleError {
    /// It was not sent.
    #[error(transparent)]
    NotSent(#[from] LookupError),
    /// GitLab could not be reached, or the connection broke.
    #[error("GitLab gave no answer")]
    Broken(#[source] legacy::Error),
}

impl Client {
    /// Sends a request of a module in the name of the agent with this token. `module` is a part of a path.
    /// The URI of `request` has the path within the module, and a query. Returns the answer, whatever its
    /// status is; redirects are not followed.
    ///
    /// Headers that say who the client is, and those that only kas may send, are replaced or dropped.
    ///
    /// # Errors
    /// [`ModuleError`]. The request is never repeated.
    ///
    /// # Cancel safety
    /// Dropping the future ends the request.
    pub async fn call_module(
        &self,
        token: &[u8],
        module: &str,
        mut request: Request<grpc::Body>,
    ) -> Result<Response<hyper::body::Incoming>, ModuleError> {
        let rate = self.module_rate.wait(Urgency::UNKNOWN_SOURCE, self.timeout);
        rate.await.map_err(|_| LookupError::Busy)?;
        let within = request.uri().path_and_query().map_or("/", |path| path.as_str());
        let uri = self.endpoint(&format!("{MODULES}{module}{within}"));
        let own = self.headers(token, request_id()).map_err(LookupError::Failed)?;
        *request.uri_mut() = uri;
        let headers = request.headers_mut();
        drop_forbidden(headers);
        for (name, value) in own {
            // What the module accepts stays.
            if let Some(name) =
                name.filter(|name| *name != header::ACCEPT || !headers.contains_key(header::ACCEPT))
            {
                headers.insert(name, value);
            }
        }
        self.http.load().request(request).await.map_err(ModuleError::Broken)
    }
}

/// Drops headers that have a credential, or that only kas sends.
fn drop_forbidden(headers: &mut HeaderMap) {
    let is_forbidden = |name: &HeaderName| {
        // Servers of Rails take both for the same.
        let name = name.as_str().replace('_', "-");
        matches!(
            name.as_str(),
            "authorization"
                | "cookie"
                | "forwarded"
                | "host"
                | "private-token"
                | "job-token"
                | "deploy-token"
        ) || ["gitlab-", "x-gitlab-", "x-forwarded-", "x-remote-", "impersonate-", "proxy-"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
    };
    let forbidden: Vec<HeaderName> = headers.keys().filter(|name| is_forbidden(name)).cloned().collect();
    for name in forbidden {
        headers.remove(name);
    }
}

impl From<Failure> for ModuleError {
    fn from(failure: Failure) -> Self {
        Self::NotSent(failure.into())
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn credentials_and_headers_of_kas_are_dropped() {
        let mut headers = HeaderMap::new();
        for name in [
            "authorization",
            "cookie",
            "private-token",
            "job-token",
            "gitlab-kas-api-request",
            "gitlab-agentk-api-request",
            "x-gitlab-client-name",
            "x-forwarded-for",
            "gitlab_kas_api_request",
            "x_forwarded_for",
            "private_token",
            "content-type",
            "x-other",
        ] {
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static("x"));
        }
        drop_forbidden(&mut headers);
        let mut left: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["content-type", "x-other"]);
    }
}
