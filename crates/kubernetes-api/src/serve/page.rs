//! The files of a page of kas, which everybody may read: they are the same for all, and know nothing.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Response, StatusCode, header};
use net::http::Body;
use observe::audit::Rule;

use super::of_kas;
use crate::failure::Failure;

/// A page that kas serves at `/fleet/page/`. Its scripts make requests below `/fleet/` with the credential
/// that their user gives them.
#[derive(Clone, Debug)]
pub struct OwnPage {
    /// Its files.
    pub files: &'static [PageFile],
    /// What each of them has besides headers of every answer. They must include a policy, because no other is
    /// added, and forbid that any other page embeds this one.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

/// A file of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFile {
    /// Its name in the folder; empty: the page itself.
    pub name: &'static str,
    /// The media type.
    pub content_type: &'static str,
    /// All of it.
    pub content: &'static str,
}

impl OwnPage {
    /// Answers a request for a file. `None` as its name stands for the folder without a slash at its end.
    pub(super) fn answer(&self, method: &Method, name: Option<&str>) -> Result<Response<Body>, Failure> {
        let mut response = match name {
            None => {
                let mut response =
                    of_kas(method, "text/plain; charset=utf-8", Bytes::from_static(b"page/\n"));
                *response.status_mut() = StatusCode::PERMANENT_REDIRECT;
                // Relative, because a proxy may serve the page below another path.
                response.headers_mut().insert(header::LOCATION, HeaderValue::from_static("page/"));
                response
            }
            Some(name) => {
                let file = self.files.iter().find(|file| file.name == name).ok_or_else(nothing)?;
                of_kas(method, file.content_type, Bytes::from_static(file.content.as_bytes()))
            }
        };
        for (name, value) in &self.headers {
            response.headers_mut().insert(name.clone(), value.clone());
        }
        Ok(response)
    }
}

/// There is no such path.
pub(super) fn nothing() -> Failure {
    Failure::refused(Rule::Form, StatusCode::NOT_FOUND, "there is nothing at this path")
}
