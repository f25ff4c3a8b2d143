//! The URL of an issuer.

use std::{fmt, str::FromStr};

use http::{Uri, uri::Scheme};
use serde::{Deserialize, Serialize};

/// Where the discovery document is, below the issuer.
const DISCOVERY: &str = "/.well-known/openid-configuration";

/// The https URL of an issuer. It is compared as a text, as OpenID Connect wants it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Issuer(String);

/// The text is not the URL of an issuer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected an https URL without a query, such as https://gitlab.example.com")]
pub(crate) struct Invalid;

impl Issuer {
    /// Returns the URL.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the URL of the discovery document.
    pub(crate) fn discovery(&self) -> String {
        format!("{}{DISCOVERY}", self.0.trim_end_matches('/'))
    }
}

impl FromStr for Issuer {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let is_plain = !text.contains(['?', '#', '@']) && text.bytes().all(|byte| byte.is_ascii_graphic());
        if is_plain && is_https(text) { Ok(Self(text.to_owned())) } else { Err(Invalid) }
    }
}

impl TryFrom<String> for Issuer {
    type Error = Invalid;

    fn try_from(text: String) -> Result<Self, Invalid> {
        text.parse()
    }
}

impl From<Issuer> for String {
    fn from(issuer: Issuer) -> Self {
        issuer.0
    }
}

impl fmt::Display for Issuer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether a text is an https URL with a host.
pub(super) fn is_https(text: &str) -> bool {
    text.parse::<Uri>().is_ok_and(|uri| {
        uri.scheme() == Some(&Scheme::HTTPS) && uri.host().is_some_and(|host| !host.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn issuers_are_https_urls() {
        for good in ["https://gitlab.test", "https://gitlab.test/", "https://dex.test:5556/dex"] {
            let issuer: Issuer = good.parse().unwrap();
            assert_eq!(issuer.as_str(), good, "the text stays as it is");
            assert!(!issuer.discovery().contains("//.well-known"), "{}", issuer.discovery());
        }
        for bad in
            ["", "gitlab.test", "http://gitlab.test", "https://", "https://a?b", "https://u@a", "https://a b"]
        {
            assert_eq!(bad.parse::<Issuer>(), Err(Invalid), "{bad}");
        }
    }
}
