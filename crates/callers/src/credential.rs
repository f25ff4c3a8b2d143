//! The credential of a request, and its forms.

use std::{fmt, sync::Arc};

use base64::{
    Engine as _,
    alphabet::URL_SAFE,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use ids::AgentId;
use secrecy::{ExposeSecret as _, SecretString, zeroize::Zeroizing};

use crate::{
    SourceKind,
    client_certificate::ClientCertificate,
    credential_error::{CredentialError, LONGEST, number},
    session::{QueryParameters, Session, take_session},
};

/// The beginning of the WebSocket subprotocol that contains a token, as the API server defines it.
const SUBPROTOCOL: &str = "base64url.bearer.authorization.k8s.io.";
/// The beginning of tokens of `users.file`.
pub(crate) const USER_TOKEN: &str = "kasu_";
/// The length of the rest of such a token: base64url of 32 bytes.
pub(crate) const USER_TOKEN_DIGITS: usize = 43;
const PROTOCOLS: HeaderName = header::SEC_WEBSOCKET_PROTOCOL;

/// base64url without padding. Unused bits of the last character are ignored, as by Go.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &URL_SAFE,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::RequireNone)
        .with_decode_allow_trailing_bits(true),
);

/// What a client presents.
#[derive(Debug, Clone)]
pub enum Credential {
    /// A token, from `Authorization: Bearer` or from a WebSocket subprotocol.
    Bearer(Bearer),
    /// A session of GitLab in a browser, from the cookie `_gitlab_kas`.
    Session(Session),
    /// A client certificate. It is never taken from a header.
    Certificate(ClientCertificate),
}

impl Credential {
    /// Returns the agent that the credential names, as in `ci:7:…`.
    pub fn agent(&self) -> Option<AgentId> {
        match self {
            Self::Bearer(bearer) => bearer.agent(),
            Self::Session(session) => session.agent(),
            Self::Certificate(_) => None,
        }
    }

    /// Returns the source that it belongs to by its form, whether kas has that source or not; `None`: no
    /// source has such credentials.
    pub fn source(&self) -> Option<SourceKind> {
        match self {
            Self::Session(_) => Some(SourceKind::Cookie),
            Self::Certificate(_) => Some(SourceKind::Certificate),
            Self::Bearer(bearer) => match bearer.form() {
                Form::Ci(_) => Some(SourceKind::Ci),
                Form::Pat(_) => Some(SourceKind::Pat),
                Form::User => Some(SourceKind::File),
                Form::Jwt => Some(SourceKind::Oidc),
                Form::Other => None,
            },
        }
    }

    /// Returns the token if it is one.
    pub fn bearer(&self) -> Option<&Bearer> {
        match self {
            Self::Bearer(bearer) => Some(bearer),
            Self::Session(_) | Self::Certificate(_) => None,
        }
    }
}

/// A token. Its memory is overwritten when the last clone is dropped, and its `Debug` shows only its form.
#[derive(Clone)]
pub struct Bearer {
    token: Arc<SecretString>,
    form: Form,
}

/// The form of a token, which determines its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `ci:<agent>:<job token>`.
    Ci(AgentId),
    /// `pat:<agent>:<personal access token>`.
    Pat(AgentId),
    /// `kasu_` and 43 characters of base64url.
    User,
    /// Three parts of base64url that are joined by dots.
    Jwt,
    /// Anything else, which no source accepts.
    Other,
}

impl Bearer {
    /// Parses a token: 1 to 16,384 visible ASCII characters.
    ///
    /// # Errors
    /// [`CredentialError::Malformed`] or [`CredentialError::TooLong`].
    pub fn parse(token: &str) -> Result<Self, CredentialError> {
        if token.len() > LONGEST {
            return Err(CredentialError::TooLong);
        }
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(CredentialError::Malformed);
        }
        let form = form(token)?;
        Ok(Self { token: Arc::new(token.into()), form })
    }

    /// Returns its form.
    pub fn form(&self) -> Form {
        self.form
    }

    /// Returns the agent that the token names.
    pub fn agent(&self) -> Option<AgentId> {
        match self.form {
            Form::Ci(agent) | Form::Pat(agent) => Some(agent),
            Form::User | Form::Jwt | Form::Other => None,
        }
    }

    /// Returns the secret: for `ci:` and `pat:` what follows the agent, for other forms the whole token.
    pub fn secret(&self) -> &str {
        let token = self.token.expose_secret();
        match self.form {
            Form::Ci(_) | Form::Pat(_) => token.splitn(3, ':').nth(2).unwrap_or_default(),
            Form::User | Form::Jwt | Form::Other => token,
        }
    }
}

impl fmt::Debug for Bearer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bearer").field("form", &self.form).finish_non_exhaustive()
    }
}

fn form(token: &str) -> Result<Form, CredentialError> {
    if let Some(rest) = token.strip_prefix("ci:") {
        return Ok(Form::Ci(agent(rest)?));
    }
    if let Some(rest) = token.strip_prefix("pat:") {
        return Ok(Form::Pat(agent(rest)?));
    }
    let is_base64 =
        |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    if let Some(digits) = token.strip_prefix(USER_TOKEN)
        && digits.len() == USER_TOKEN_DIGITS
        && is_base64(digits)
    {
        return Ok(Form::User);
    }
    let mut parts = 0;
    let is_jwt = token.split('.').all(|part| {
        parts += 1;
        !part.is_empty() && is_base64(part)
    });
    Ok(if is_jwt && parts == 3 { Form::Jwt } else { Form::Other })
}

/// Parses `<agent>:<secret>` and returns the agent. Its number has no sign and no leading zero.
fn agent(text: &str) -> Result<AgentId, CredentialError> {
    let (id, secret) = text.split_once(':').ok_or(CredentialError::Malformed)?;
    number(id).filter(|_| !secret.is_empty()).ok_or(CredentialError::Malformed)
}

/// Takes the credential out of the headers of a request, which contain none afterwards: removes
/// `Authorization`, the subprotocol with a token from `Sec-WebSocket-Protocol`, and the cookies. A request
/// with a token is never judged by its cookie. `parameters` are those of a session in the query, see
/// [`take_query_parameters`](crate::take_query_parameters). `is_websocket` says whether the request is the
/// handshake of a WebSocket; in other requests a subprotocol is not a credential.
///
/// # Errors
/// [`CredentialError`] if the request must be refused. `Ok(None)`: there is no credential.
pub fn take_credential(
    headers: &mut HeaderMap,
    parameters: QueryParameters,
    is_websocket: bool,
) -> Result<Option<Credential>, CredentialError> {
    let session = take_session(headers, parameters);
    let subprotocol = take_subprotocol(headers);
    let authorization = match headers.entry(header::AUTHORIZATION) {
        header::Entry::Vacant(_) => None,
        header::Entry::Occupied(values) => {
            let mut values = values.remove_entry_mult().1;
            let first = values.next();
            if values.next().is_some() {
                return Err(CredentialError::Several);
            }
            first
        }
    };
    let subprotocol = subprotocol?;
    let bearer = match (authorization, subprotocol) {
        (Some(_), Some(_)) => return Err(CredentialError::Twice),
        (Some(value), None) => Bearer::parse(bearer(&value)?)?,
        (None, Some(encoded)) if is_websocket => {
            if !headers.contains_key(PROTOCOLS) {
                return Err(CredentialError::Alone);
            }
            let bytes = BASE64.decode(encoded.as_bytes()).map_err(|_| CredentialError::Malformed)?;
            let token = Zeroizing::new(bytes);
            Bearer::parse(std::str::from_utf8(&token).map_err(|_| CredentialError::Malformed)?)?
        }
        (None, _) => return Ok(session?.map(Credential::Session)),
    };
    Ok(Some(Credential::Bearer(bearer)))
}

/// Returns what follows the scheme, which is compared as RFC 9110 says.
fn bearer(value: &HeaderValue) -> Result<&str, CredentialError> {
    let text = value.to_str().map_err(|_| CredentialError::Malformed)?;
    let (scheme, token) = text.split_once(' ').ok_or(CredentialError::Scheme)?;
    if scheme.eq_ignore_ascii_case("bearer") { Ok(token) } else { Err(CredentialError::Scheme) }
}

/// Removes the subprotocol with a token and returns the token as it was encoded.
fn take_subprotocol(headers: &mut HeaderMap) -> Result<Option<Zeroizing<String>>, CredentialError> {
    let has_token = |value: &HeaderValue| {
        value.as_bytes().windows(SUBPROTOCOL.len()).any(|window| window == SUBPROTOCOL.as_bytes())
    };
    if !headers.get_all(PROTOCOLS).iter().any(has_token) {
        return Ok(None);
    }
    let mut found = None;
    let mut is_second = false;
    let mut kept: Vec<Vec<u8>> = Vec::new();
    for value in headers.get_all(PROTOCOLS) {
        for protocol in value.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii) {
            match protocol.strip_prefix(SUBPROTOCOL.as_bytes()) {
                Some(token) => {
                    is_second |= found.is_some();
                    found = Some(Zeroizing::new(String::from_utf8_lossy(token).into_owned()));
                }
                None if protocol.is_empty() => {}
                None => kept.push(protocol.to_vec()),
            }
        }
    }
    headers.remove(PROTOCOLS);
    if !kept.is_empty() {
        // Parts of valid values, joined by a comma, are a valid value.
        let joined = HeaderValue::from_bytes(&kept.join(&b", "[..]));
        headers.insert(PROTOCOLS, joined.map_err(|_| CredentialError::Malformed)?);
    }
    if is_second { Err(CredentialError::Twice) } else { Ok(found) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USER: &str = "kasu_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNO-_";

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in list {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    /// Takes the credential of these headers. Returns its form and secret, and the headers that are left.
    fn taken(
        list: &[(&'static str, &str)],
        is_websocket: bool,
    ) -> (Result<Option<(Form, String)>, CredentialError>, HeaderMap) {
        let mut headers = headers(list);
        let taken = take_credential(&mut headers, QueryParameters::default(), is_websocket);
        let shown = |credential: Credential| {
            let bearer = credential.bearer().unwrap();
            (bearer.form(), bearer.secret().to_owned())
        };
        (taken.map(|credential| credential.map(shown)), headers)
    }

    fn agent(id: i64) -> AgentId {
        AgentId::new(id).unwrap()
    }

    fn encoded(token: &str) -> String {
        format!("{SUBPROTOCOL}{}", BASE64.encode(token))
    }

    #[test]
    fn a_token_has_a_form_and_perhaps_an_agent() {
        let jwt = "eyJh.eyJp.c2ln";
        for (token, form, secret) in [
            (USER, Form::User, USER),
            ("ci:7:glcbt-1:2", Form::Ci(agent(7)), "glcbt-1:2"),
            ("pat:12:glpat-x", Form::Pat(agent(12)), "glpat-x"),
            (jwt, Form::Jwt, jwt),
            ("a.b", Form::Other, "a.b"),
            ("a.b.c.d", Form::Other, "a.b.c.d"),
            ("a..c", Form::Other, "a..c"),
            ("CI:7:a", Form::Other, "CI:7:a"),
            ("user:7:a", Form::Other, "user:7:a"),
            (&USER[..USER.len() - 1], Form::Other, &USER[..USER.len() - 1]),
            (
                "kasu_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNO-+",
                Form::Other,
                "kasu_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNO-+",
            ),
        ] {
            let value = format!("Bearer {token}");
            let (taken, left) = taken(&[("authorization", &value), ("accept", "a")], false);
            assert_eq!(taken, Ok(Some((form, secret.to_owned()))), "{token}");
            assert_eq!(left, headers(&[("accept", "a")]));
        }
        let ci = Bearer::parse("ci:7:x").unwrap();
        assert_eq!(Credential::Bearer(ci).agent(), Some(agent(7)));
        assert_eq!(Credential::Bearer(Bearer::parse(USER).unwrap()).agent(), None);
    }

    #[test]
    fn malformed_tokens_are_refused() {
        for token in [
            "",
            " a",
            "a b",
            "a\u{e9}",
            "ci:7",
            "ci:7:",
            "ci::a",
            "ci:0:a",
            "ci:07:a",
            "ci:+7:a",
            "ci:-7:a",
            "ci:x:a",
            "ci: 7:a",
            "ci:9223372036854775808:a",
            "pat:7",
            "pat:a:b",
        ] {
            let (taken, left) = taken(&[("authorization", &format!("Bearer {token}"))], false);
            assert_eq!(taken, Err(CredentialError::Malformed), "{token:?}");
            assert!(left.is_empty());
        }
        for value in ["Bearer", "Basic dTpw", "bearer:a", "Bearer\ta", "Token a", ""] {
            assert_eq!(
                taken(&[("authorization", value)], false).0,
                Err(CredentialError::Scheme),
                "{value:?}"
            );
        }
        assert!(taken(&[("authorization", "bEARER a")], false).0.is_ok());
        let long = format!("Bearer {}", "a".repeat(LONGEST));
        assert!(taken(&[("authorization", &long)], false).0.is_ok());
        assert_eq!(taken(&[("authorization", &(long + "a"))], false).0, Err(CredentialError::TooLong));
        let two = [("authorization", "Bearer a"), ("authorization", "Bearer a")];
        let (taken, left) = taken(&two, false);
        assert_eq!(taken, Err(CredentialError::Several));
        assert!(left.is_empty() && !CredentialError::Several.is_bad_request());
    }

    #[test]
    fn a_subprotocol_with_a_token_is_taken_and_the_others_stay() {
        let (token, v5) = (encoded(USER), "v5.channel.k8s.io");
        let both = format!("{v5}, {token} ,v4.channel.k8s.io");
        let (found, left) = taken(&[("sec-websocket-protocol", &both)], true);
        assert_eq!(found, Ok(Some((Form::User, USER.to_owned()))));
        assert_eq!(left, headers(&[("sec-websocket-protocol", "v5.channel.k8s.io, v4.channel.k8s.io")]));
        // In a header of its own.
        let (found, left) =
            taken(&[("sec-websocket-protocol", v5), ("sec-websocket-protocol", &token)], true);
        assert_eq!(found, Ok(Some((Form::User, USER.to_owned()))));
        assert_eq!(left, headers(&[("sec-websocket-protocol", v5)]));
        // Without one, nothing changes.
        let (found, left) = taken(&[("sec-websocket-protocol", "a,b")], true);
        assert_eq!((found, left), (Ok(None), headers(&[("sec-websocket-protocol", "a,b")])));
    }

    #[test]
    fn a_subprotocol_is_always_taken_out_and_counts_only_for_a_websocket() {
        let both = format!("a,{}", encoded(USER));
        let (found, left) = taken(&[("sec-websocket-protocol", &both)], false);
        assert_eq!((found, left), (Ok(None), headers(&[("sec-websocket-protocol", "a")])));
        let (found, left) = taken(&[("sec-websocket-protocol", &encoded(USER))], false);
        assert_eq!((found, left), (Ok(None), HeaderMap::new()));
    }

    #[test]
    fn wrong_subprotocols_are_refused() {
        let (one, two) = (encoded(USER), encoded("b"));
        let plain = ("authorization", "Bearer a");
        for (list, error) in [
            (vec![("sec-websocket-protocol", format!("a,{one},{two}"))], CredentialError::Twice),
            (
                vec![("sec-websocket-protocol", format!("a,{one}")), ("sec-websocket-protocol", one.clone())],
                CredentialError::Twice,
            ),
            (
                vec![(plain.0, plain.1.to_owned()), ("sec-websocket-protocol", format!("a,{one}"))],
                CredentialError::Twice,
            ),
            (vec![("sec-websocket-protocol", one.clone())], CredentialError::Alone),
            (vec![("sec-websocket-protocol", format!("{one},"))], CredentialError::Alone),
        ] {
            let list: Vec<_> = list.iter().map(|(name, value)| (*name, value.as_str())).collect();
            let (found, left) = taken(&list, true);
            assert_eq!(found, Err(error), "{list:?}");
            assert!(error.is_bad_request());
            assert!(!format!("{left:?}").contains(SUBPROTOCOL), "{left:?}");
        }
        for bad in ["!", "YQ==", "YQ=", "/w", "_w", ""] {
            let value = format!("a,{SUBPROTOCOL}{bad}");
            let (found, _) = taken(&[("sec-websocket-protocol", &value)], true);
            assert_eq!(found, Err(CredentialError::Malformed), "{bad:?}");
        }
    }

    #[test]
    fn a_token_takes_precedence_and_a_cookie_is_never_a_second_try() {
        let with = |authorization: &str| {
            let list = [("authorization", authorization), ("cookie", "_gitlab_kas=x"), ("x-csrf-token", "a")];
            let list = list.into_iter().filter(|(_, value)| !value.is_empty()).collect::<Vec<_>>();
            let mut headers = headers(&list);
            let taken = take_credential(&mut headers, QueryParameters::default(), false);
            assert!(headers.is_empty());
            taken.map(|credential| credential.and_then(|credential| credential.source()))
        };
        assert_eq!(with("Bearer ci:7:x"), Ok(Some(SourceKind::Ci)));
        assert_eq!(with("Bearer x"), Ok(None));
        assert_eq!(with("Basic a"), Err(CredentialError::Scheme));
        assert_eq!(with(""), Ok(Some(SourceKind::Cookie)));
    }

    #[test]
    fn no_text_of_a_credential_shows_the_token() {
        let credential = Credential::Bearer(Bearer::parse("ci:7:hunter2").unwrap());
        assert!(!format!("{credential:?}").contains("hunter2"));
    }
}
