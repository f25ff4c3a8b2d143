//! As whom a request runs in the cluster.

use http::{HeaderMap, HeaderName, HeaderValue};
use kube_request::headers::is_impersonation;

static USER: HeaderName = HeaderName::from_static("impersonate-user");
static GROUP: HeaderName = HeaderName::from_static("impersonate-group");

/// As whom a request runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity<'a> {
    /// With the credentials of agentk, and their permissions.
    Agent,
    /// As another user, with these groups.
    Impersonated {
        /// The user.
        user: &'a str,
        /// The groups.
        groups: Vec<&'a str>,
    },
}

/// Why it cannot be said as whom a request runs. It must not be sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidIdentity {
    /// There is an `Impersonate-*` header, but no `Impersonate-User`.
    #[error("the request has {0} but no Impersonate-User")]
    NoUser(HeaderName),
    /// There are several `Impersonate-User`, of which an API server uses the first.
    #[error("the request has several Impersonate-User")]
    SeveralUsers,
    /// A value is empty or too long, is not UTF-8, has control characters, or begins or ends with white
    /// space. An API server removes such white space, and so would see another name than the one that was
    /// judged.
    #[error(
        "the value of {0} is not a name of 1 to 1024 bytes, without control characters and white space at its ends"
    )]
    Value(HeaderName),
}

impl<'a> Identity<'a> {
    /// Reads the identity of a request from its headers. They are those that are sent to the API server, so
    /// that it does not matter whether kas or the client of kas set them, and how they were spelled.
    ///
    /// # Errors
    /// [`InvalidIdentity`].
    pub fn of(headers: &'a HeaderMap) -> Result<Self, InvalidIdentity> {
        let Some(any) = headers.keys().find(|name| is_impersonation(name.as_str())) else {
            return Ok(Self::Agent);
        };
        let user = match *names(headers, &USER)? {
            [] => return Err(InvalidIdentity::NoUser(any.clone())),
            [user] => user,
            _ => return Err(InvalidIdentity::SeveralUsers),
        };
        Ok(Self::Impersonated { user, groups: names(headers, &GROUP)? })
    }

    /// The impersonated user; `None`: agentk itself.
    pub fn user(&self) -> Option<&'a str> {
        match self {
            Self::Agent => None,
            Self::Impersonated { user, .. } => Some(*user),
        }
    }
}

/// Returns the values of a header.
fn names<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Vec<&'a str>, InvalidIdentity> {
    let values = headers.get_all(name).into_iter();
    values.map(|value| text(value).ok_or_else(|| InvalidIdentity::Value(name.clone()))).collect()
}

fn text(value: &HeaderValue) -> Option<&str> {
    std::str::from_utf8(value.as_bytes()).ok().filter(|text| ids::check_identity_value(text).is_ok())
}
