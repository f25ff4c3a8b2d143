//! [`Status`]: how a call ended, and its form in HTTP/2 trailers.

use std::fmt;

use base64::{
    Engine as _,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use percent_encoding::{AsciiSet, CONTROLS, percent_decode, percent_encode};
use prost::Message as _;

/// Largest size of trailers in bytes. Every peer accepts a header list of 16 KiB; 12 KiB leave room for the
/// other headers of the block.
const MAX_TRAILERS: usize = 12 * 1024;

/// Bytes that the gRPC specification percent-encodes in `grpc-message`: all but printable ASCII, and the
/// percent sign.
const MESSAGE: &AsciiSet = &CONTROLS.add(b'%');

/// The domain of details that only kas attaches. In the status of an agent such details are removed, so that
/// an agent cannot forge "not started" and make a caller repeat a request that ran.
pub const KAS_DOMAIN: &str = "kas";

const ERROR_INFO_URL: &str = "type.googleapis.com/google.rpc.ErrorInfo";
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const GRPC_DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");

const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_encode_padding(false)
        .with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// A gRPC code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(missing_docs)] // the names of the gRPC specification
pub enum Code {
    Ok = 0,
    Cancelled = 1,
    Unknown = 2,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    AlreadyExists = 6,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Aborted = 10,
    OutOfRange = 11,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    DataLoss = 15,
    Unauthenticated = 16,
}

impl Code {
    const ALL: [Self; 17] = [
        Self::Ok,
        Self::Cancelled,
        Self::Unknown,
        Self::InvalidArgument,
        Self::DeadlineExceeded,
        Self::NotFound,
        Self::AlreadyExists,
        Self::PermissionDenied,
        Self::ResourceExhausted,
        Self::FailedPrecondition,
        Self::Aborted,
        Self::OutOfRange,
        Self::Unimplemented,
        Self::Internal,
        Self::Unavailable,
        Self::DataLoss,
        Self::Unauthenticated,
    ];

    /// Returns the code with this number. Numbers without a code give [`Code::Unknown`].
    pub fn from_number(number: i64) -> Self {
        usize::try_from(number).ok().and_then(|n| Self::ALL.get(n).copied()).unwrap_or(Self::Unknown)
    }

    /// Returns the code with this number, for an *error*: 0 and numbers without a code give
    /// [`Code::Unknown`].
    pub fn from_error_number(number: i64) -> Self {
        match Self::from_number(number) {
            Self::Ok => Self::Unknown,
            code => code,
        }
    }

    /// Returns the number on the wire.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Returns the number as text.
    pub fn digits(self) -> &'static str {
        const DIGITS: [&str; 17] =
            ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16"];
        DIGITS[self as usize]
    }

    /// Returns the name in the spelling of the gRPC specification.
    pub fn name(self) -> &'static str {
        const NAMES: [&str; 17] = [
            "OK",
            "CANCELLED",
            "UNKNOWN",
            "INVALID_ARGUMENT",
            "DEADLINE_EXCEEDED",
            "NOT_FOUND",
            "ALREADY_EXISTS",
            "PERMISSION_DENIED",
            "RESOURCE_EXHAUSTED",
            "FAILED_PRECONDITION",
            "ABORTED",
            "OUT_OF_RANGE",
            "UNIMPLEMENTED",
            "INTERNAL",
            "UNAVAILABLE",
            "DATA_LOSS",
            "UNAUTHENTICATED",
        ];
        NAMES[self as usize]
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The outcome of a request that was not answered completely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing of the request was written to an agent: repeating it is safe.
    NotStarted,
    /// The request was started and no complete answer came: only an idempotent request may be repeated.
    Unknown,
}

impl Outcome {
    /// Returns the value of `kas.outcome`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotStarted => "not_started",
            Self::Unknown => "unknown",
        }
    }
}

/// How a call ended.
#[derive(Clone, PartialEq)]
pub struct Status {
    code: Code,
    message: String,
    details: Vec<prost_types::Any>,
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:?} ({} details)", self.code, self.message, self.details.len())
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

impl std::error::Error for Status {}

impl Status {
    /// Returns a status without details.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details: Vec::new() }
    }

    /// Attaches the outcome of the request, in the domain of kas. A status has one outcome: the last one
    /// replaces an earlier one. Details of other domains stay.
    pub fn with_outcome(mut self, outcome: Outcome) -> Self {
        self.details.retain(|detail| kas_info(detail).is_none());
        let info = proto::google::rpc::ErrorInfo {
            reason: match outcome {
                Outcome::NotStarted => "NOT_STARTED".into(),
                Outcome::Unknown => "OUTCOME_UNKNOWN".into(),
            },
            domain: KAS_DOMAIN.into(),
            metadata: [("kas.outcome".to_owned(), outcome.as_str().to_owned())].into(),
        };
        self.details.push(prost_types::Any { type_url: ERROR_INFO_URL.into(), value: info.encode_to_vec() });
        self
    }

    /// Returns the code.
    pub fn code(&self) -> Code {
        self.code
    }

    /// Returns the message, not percent-encoded.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the outcome that kas attached, if any.
    pub fn outcome(&self) -> Option<Outcome> {
        self.details.iter().find_map(|detail| {
            let info = kas_info(detail)?;
            match info.metadata.get("kas.outcome").map(String::as_str) {
                Some("not_started") => Some(Outcome::NotStarted),
                Some("unknown") => Some(Outcome::Unknown),
                _ => None,
            }
        })
    }

    /// Converts the status that an agent sent. It is an error whatever its number says, and details in the
    /// domain of kas are removed.
    pub fn from_agent(status: proto::google::rpc::Status) -> Self {
        Self {
            code: Code::from_error_number(status.code.into()),
            message: status.message,
            details: status.details.into_iter().filter(|detail| kas_info(detail).is_none()).collect(),
        }
    }

    /// Returns the status as a protobuf message.
    pub fn to_proto(&self) -> proto::google::rpc::Status {
        proto::google::rpc::Status {
            code: self.code.number().into(),
            message: self.message.clone(),
            details: self.details.clone(),
        }
    }

    /// Reads the status from trailers, or from the headers of a response without a body. `None`: there is no
    /// `grpc-status`.
    pub fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let number =
            std::str::from_utf8(headers.get(GRPC_STATUS)?.as_bytes()).ok().and_then(|s| s.parse().ok());
        let message = headers
            .get(GRPC_MESSAGE)
            .map_or_else(String::new, |v| percent_decode(v.as_bytes()).decode_utf8_lossy().into_owned());
        let details = headers
            .get(GRPC_DETAILS)
            .and_then(|v| BASE64.decode(v.as_bytes()).ok())
            .and_then(|bytes| proto::google::rpc::Status::decode(Bytes::from(bytes)).ok())
            .map(|status| status.details)
            .unwrap_or_default();
        Some(Self { code: Code::from_number(number.unwrap_or(-1)), message, details })
    }

    /// Adds `grpc-status` to `headers`, and the message and the details if there are any.
    ///
    /// If the trailers would be larger than a peer accepts, parts are left out in this order: the other
    /// trailers, the details, the end of the message. The code is always written.
    pub fn write_to(&self, headers: &mut HeaderMap) {
        let details = (!self.details.is_empty()).then(|| BASE64.encode(self.to_proto().encode_to_vec()));
        let message = percent_encode(self.message.as_bytes(), MESSAGE).to_string();
        let mut own = 64 + message.len() + details.as_ref().map_or(0, |d| 64 + d.len());
        if own + size(headers) > MAX_TRAILERS {
            headers.clear();
        }
        let details = details.filter(|d| {
            let keep = own <= MAX_TRAILERS;
            own -= if keep { 0 } else { 64 + d.len() };
            keep
        });
        headers.insert(GRPC_STATUS, HeaderValue::from_static(self.code.digits()));
        if !message.is_empty() {
            let end = shorten(&message, MAX_TRAILERS - 64);
            if let Ok(value) = HeaderValue::from_str(&message[..end]) {
                headers.insert(GRPC_MESSAGE, value);
            }
        }
        if let Some(value) = details.and_then(|d| HeaderValue::from_str(&d).ok()) {
            headers.insert(GRPC_DETAILS, value);
        }
    }

    /// Returns a response that has only headers and no body.
    pub fn into_response<B: Default>(&self) -> http::Response<B> {
        let mut response = http::Response::new(B::default());
        response.headers_mut().insert(http::header::CONTENT_TYPE, crate::CONTENT_TYPE);
        self.write_to(response.headers_mut());
        response
    }
}

impl Status {
    /// Writes `grpc-status: 0`. The other trailers are dropped if they are larger than a peer accepts.
    pub fn write_ok(headers: &mut HeaderMap) {
        if size(headers) + 64 > MAX_TRAILERS {
            headers.clear();
        }
        headers.insert(GRPC_STATUS, HeaderValue::from_static("0"));
    }
}

fn kas_info(detail: &prost_types::Any) -> Option<proto::google::rpc::ErrorInfo> {
    // A type URL may have any prefix: the name after the last slash counts.
    if detail.type_url.rsplit('/').next() != Some("google.rpc.ErrorInfo") {
        return None;
    }
    let info = proto::google::rpc::ErrorInfo::decode(detail.value.as_slice()).ok()?;
    (info.domain == KAS_DOMAIN).then_some(info)
}

/// Returns the size of a header list by HPACK's rules: 32 bytes per field besides name and value.
fn size(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| 32 + name.as_str().len() + value.len()).sum()
}

/// Returns where to cut `message`: at most at `max`, and not inside a percent-encoded byte.
fn shorten(message: &str, max: usize) -> usize {
    if message.len() <= max {
        return message.len();
    }
    match message.as_bytes()[max - 2..max].iter().position(|b| *b == b'%') {
        Some(at) => max - 2 + at,
        None => max,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_survives_trailers_with_its_details() {
        let status =
            Status::new(Code::Unavailable, "no agent: 100 % ünknown\n").with_outcome(Outcome::NotStarted);
        let mut headers = HeaderMap::new();
        status.write_to(&mut headers);
        assert_eq!(headers["grpc-message"], "no agent: 100 %25 %C3%BCnknown%0A");
        let read = Status::from_headers(&headers).unwrap();
        assert_eq!(read, status);
        assert_eq!(read.outcome(), Some(Outcome::NotStarted));
    }

    #[test]
    fn an_agent_cannot_attach_details_in_the_domain_of_kas() {
        let forged = Status::new(Code::Unavailable, "x").with_outcome(Outcome::NotStarted).to_proto();
        assert_eq!(Status::from_agent(forged).outcome(), None);
    }

    #[test]
    fn a_status_has_one_outcome_and_keeps_foreign_details() {
        let foreign = proto::google::rpc::ErrorInfo { domain: "agent.example".into(), ..Default::default() };
        let foreign = prost_types::Any { type_url: ERROR_INFO_URL.into(), value: foreign.encode_to_vec() };
        let from_agent = proto::google::rpc::Status {
            code: Code::Unavailable.number().into(),
            details: vec![foreign.clone()],
            ..Default::default()
        };
        let status =
            Status::from_agent(from_agent).with_outcome(Outcome::NotStarted).with_outcome(Outcome::Unknown);
        assert_eq!(status.outcome(), Some(Outcome::Unknown));
        let details = status.to_proto().details;
        assert_eq!(details.len(), 2);
        assert_eq!(details[0], foreign);
    }

    #[test]
    fn the_code_of_an_agents_error_is_never_ok_nor_out_of_range() {
        for (number, code) in
            [(0, Code::Unknown), (17, Code::Unknown), (-1, Code::Unknown), (7, Code::PermissionDenied)]
        {
            let status = proto::google::rpc::Status { code: number, ..Default::default() };
            assert_eq!(Status::from_agent(status).code(), code);
        }
    }

    #[test]
    fn trailers_that_are_too_large_lose_other_keys_then_details_then_the_end_of_the_message() {
        let big = HeaderValue::from_str(&"x".repeat(12_200)).unwrap();
        let mut headers = HeaderMap::new();
        headers.insert("app", big.clone());
        Status::new(Code::NotFound, "m").with_outcome(Outcome::Unknown).write_to(&mut headers);
        assert!(!headers.contains_key("app") && headers.contains_key("grpc-status-details-bin"));

        let mut headers = HeaderMap::new();
        Status::new(Code::NotFound, "é".repeat(20_000)).with_outcome(Outcome::Unknown).write_to(&mut headers);
        assert!(!headers.contains_key("grpc-status-details-bin"));
        assert_eq!(headers["grpc-status"], "5");
        assert!(size(&headers) <= MAX_TRAILERS + 64);
        assert!(Status::from_headers(&headers).unwrap().message().starts_with('é'));
    }

    #[test]
    fn hostile_trailers_do_not_panic() {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-status", HeaderValue::from_static("nonsense"));
        headers.insert("grpc-message", HeaderValue::from_bytes(b"%zz%F").unwrap());
        headers.insert("grpc-status-details-bin", HeaderValue::from_static("!!!"));
        assert_eq!(Status::from_headers(&headers).unwrap().code(), Code::Unknown);
    }
}
