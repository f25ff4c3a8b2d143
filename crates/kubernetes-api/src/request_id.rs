//! The id of a request.

use http::HeaderValue;

/// A random id of 32 hexadecimal digits: in `X-Request-Id` of the answer, in every error, in the audit log,
/// and in the API server's audit log as `kas-<id>`.
///
/// The client's own id is ignored, so that it cannot imitate that of another request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestId(String);

impl RequestId {
    /// Draws an id.
    pub(crate) fn random() -> Self {
        Self::of_bits(rand::random())
    }

    pub(crate) fn of_bits(bits: u128) -> Self {
        Self(format!("{bits:032x}"))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the value of the header `Audit-ID`, under which the API server records the request.
    pub(crate) fn audit_id(&self) -> String {
        format!("kas-{}", self.0)
    }

    /// Returns the value of a header. It is marked as sensitive to keep it out of HPACK's tables, since no
    /// other request has it.
    pub(crate) fn to_value(&self) -> HeaderValue {
        let mut value = HeaderValue::from_str(&self.0).expect("hexadecimal digits are a legal header value");
        value.set_sensitive(true);
        value
    }
}
