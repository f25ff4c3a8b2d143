//! Answers of an issuer. Unknown fields are ignored.

use std::fmt;

use serde::Deserialize;

use crate::table::excerpt;

/// The discovery document.
#[derive(Deserialize)]
pub(super) struct Metadata {
    pub(super) issuer: String,
    pub(super) token_endpoint: String,
    pub(super) device_authorization_endpoint: Option<String>,
    pub(super) revocation_endpoint: Option<String>,
    pub(super) scopes_supported: Option<Vec<String>>,
}

/// The answer of the device authorization endpoint.
#[derive(Deserialize)]
pub(super) struct DeviceCode {
    pub(super) device_code: String,
    pub(super) user_code: String,
    pub(super) verification_uri: String,
    pub(super) verification_uri_complete: Option<String>,
    /// Seconds.
    pub(super) expires_in: u64,
    /// Seconds.
    pub(super) interval: Option<u64>,
}

/// The answer of the token endpoint.
#[derive(Deserialize)]
pub(super) struct Tokens {
    pub(super) id_token: Option<String>,
    pub(super) refresh_token: Option<String>,
}

/// An error of OAuth (RFC 6749, 5.2).
#[derive(Debug, Deserialize)]
pub(crate) struct ErrorAnswer {
    /// Its code.
    pub(crate) error: String,
    /// A text for people.
    #[serde(rename = "error_description")]
    pub(crate) description: Option<String>,
}

impl fmt::Display for ErrorAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&excerpt(&self.error))?;
        match &self.description {
            Some(description) => write!(f, " ({})", excerpt(description)),
            None => Ok(()),
        }
    }
}

/// Describes where JSON is wrong, without any of its text, which may have secrets.
pub(super) fn place(error: &serde_json::Error) -> String {
    format!("it is no valid JSON of this kind (line {}, column {})", error.line(), error.column())
}
