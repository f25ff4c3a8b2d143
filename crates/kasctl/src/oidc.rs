//! A client of an OpenID Connect issuer: the device flow (RFC 8628), refresh, and the end of a login. Keeps
//! nothing; the module `login_session` does.

mod answer;
mod issuer;

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::Full;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use secrecy::{ExposeSecret as _, SecretString, zeroize::Zeroizing};
use tokio::time::{Instant, sleep};

use self::answer::{DeviceCode, ErrorAnswer, Metadata, Tokens};
pub(crate) use self::issuer::Issuer;
use crate::{
    https::{self, send_within},
    link::TlsOptions,
    table::excerpt,
    user_token::{IdToken, NotIdToken},
};

/// The time limit of each request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The largest answer, in bytes.
const LARGEST: usize = 1024 * 1024;
/// The interval of polls, unless the issuer sets one (RFC 8628, 3.2).
const INTERVAL: Duration = Duration::from_secs(5);
/// An issuer that asks for no interval gets this one.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(200);
/// The interval grows up to this one.
const LONGEST_INTERVAL: Duration = Duration::from_secs(60);
/// The interval grows by this with each answer `slow_down` (RFC 8628, 3.5).
const SLOW_DOWN: Duration = Duration::from_secs(5);
/// The longest time for which a code is tried, whatever the issuer says.
const LONGEST_CODE: Duration = Duration::from_secs(3_600);

const DEVICE_GRANT: &str = "urn:ietf:params:oauth:grant-type:device_code";
const FORM: &str = "application/x-www-form-urlencoded";
/// Characters that are not escaped in a form.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Scopes that are requested if the issuer says that it has them. `openid` is always requested.
const USUAL_SCOPES: [&str; 4] = ["profile", "email", "groups", "offline_access"];
/// Those that are requested if the issuer does not say which it has.
const BLIND_SCOPES: [&str; 1] = ["offline_access"];

/// Why a request to the issuer failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// No connection.
    #[error("cannot reach the issuer at {url}: {why}")]
    Connect {
        /// The URL.
        url: String,
        /// The cause.
        why: String,
    },
    /// The request was sent, and the issuer has not answered it, or not for now.
    #[error("the issuer at {url} did not answer: {why}")]
    Away {
        /// The URL.
        url: String,
        /// What happened.
        why: String,
    },
    /// The answer is not one of OpenID Connect.
    #[error("the issuer at {url} did not answer as expected: {why}")]
    Answer {
        /// The URL.
        url: String,
        /// What was wrong.
        why: String,
    },
    /// The issuer refused the request.
    #[error("the issuer at {url} refused: {}", .answer)]
    Refused {
        /// The URL.
        url: String,
        /// What it said.
        answer: ErrorAnswer,
    },
    /// The user has said no.
    #[error("the login was denied in the browser")]
    Denied,
    /// The user has entered the code too late, or never.
    #[error("the code has expired before it was entered: run 'kasctl login' again")]
    CodeExpired,
    /// It does not have the device flow.
    #[error(
        "the issuer {0} has no device_authorization_endpoint: it does not offer the device flow (RFC 8628), or not \
         to this client"
    )]
    NoDeviceFlow(Issuer),
    /// The tokens cannot be used.
    #[error("the ID token of the issuer {issuer} cannot be used: {why}")]
    IdToken {
        /// The issuer.
        issuer: Issuer,
        /// What is wrong.
        why: NotIdToken,
    },
    /// `--ca-file` cannot be used.
    #[error("{0}; set a PEM file with certificates with --ca-file")]
    CaFile(#[source] https::Error),
}

impl Error {
    /// Whether the issuer was not there, so that it helps to try again.
    pub(crate) fn is_unreachable(&self) -> bool {
        matches!(self, Self::Connect { .. } | Self::Away { .. })
    }

    /// Whether only a new login helps, after a refresh: the issuer does not accept the refresh token any
    /// more, or gives no ID token for it.
    pub(crate) fn needs_login(&self) -> bool {
        match self {
            Self::Refused { answer, .. } => answer.error == "invalid_grant",
            Self::IdToken { .. } => true,
            _ => false,
        }
    }
}

/// What a successful request for tokens gives.
#[derive(Debug)]
pub(crate) struct Granted {
    /// The ID token, whose claims were checked.
    pub(crate) id_token: IdToken,
    /// `None`: the issuer gave none, or the one before stays valid.
    pub(crate) refresh_token: Option<SecretString>,
}

/// An issuer's endpoints, and how it is reached.
#[derive(Debug)]
pub(crate) struct Client<'a> {
    /// The issuer.
    pub(crate) issuer: &'a Issuer,
    /// The client id.
    pub(crate) client_id: &'a str,
    /// The authorities of the issuer's certificate.
    pub(crate) tls: &'a TlsOptions,
}

/// What the user must do.
#[derive(Debug)]
pub(crate) struct Instructions {
    /// Where to enter the code.
    pub(crate) verification_uri: String,
    /// The same with the code in it.
    pub(crate) verification_uri_complete: Option<String>,
    /// The code to enter.
    pub(crate) user_code: String,
    /// For how long it is valid.
    pub(crate) valid_for: Duration,
}

/// A device flow whose code the user must enter.
#[derive(Debug)]
pub(crate) struct Pending {
    /// What the user must do.
    pub(crate) instructions: Instructions,
    device_code: SecretString,
    interval: Duration,
    until: Instant,
}

/// The endpoints that are needed.
#[derive(Debug, Clone)]
pub(crate) struct Endpoints {
    /// For all tokens.
    pub(crate) token: String,
    /// For the device flow.
    device: Option<String>,
    /// For the end of a login (RFC 7009).
    pub(crate) revocation: Option<String>,
    scopes: Option<Vec<String>>,
}

impl Client<'_> {
    /// Discovers the endpoints.
    ///
    /// # Errors
    /// See [`Error`]. Endpoints without https are an error.
    pub(crate) async fn discover(&self) -> Result<Endpoints, Error> {
        let url = self.issuer.discovery();
        let not = |why: String| Error::Answer { url: url.clone(), why };
        let (status, body) = self.send(&url, Method::GET, None).await?;
        if status != StatusCode::OK {
            return Err(not(format!("HTTP {status}; is --issuer right?")));
        }
        let found: Metadata = serde_json::from_slice(&body).map_err(|error| not(error.to_string()))?;
        // Else another party could give out tokens in the name of this issuer.
        if found.issuer != self.issuer.as_str() {
            return Err(not(format!(
                "its issuer is {}: set --issuer to exactly that",
                excerpt(&found.issuer)
            )));
        }
        let endpoints = Endpoints {
            token: found.token_endpoint,
            device: found.device_authorization_endpoint,
            revocation: found.revocation_endpoint,
            scopes: found.scopes_supported,
        };
        let all = [Some(&endpoints.token), endpoints.device.as_ref(), endpoints.revocation.as_ref()];
        let plain = all.into_iter().flatten().find(|url| !issuer::is_https(url)).map(|url| excerpt(url));
        match plain {
            Some(plain) => Err(not(format!("the endpoint {plain} has no https URL"))),
            None => Ok(endpoints),
        }
    }

    /// Begins the device flow. Without `scopes`, those that are usual are requested.
    ///
    /// # Errors
    /// See [`Error`].
    pub(crate) async fn begin(&self, endpoints: &Endpoints, scopes: &[String]) -> Result<Pending, Error> {
        let url = endpoints.device.as_ref().ok_or_else(|| Error::NoDeviceFlow(self.issuer.clone()))?;
        let scope = scope(scopes, endpoints.scopes.as_deref());
        let form = form(&[("client_id", self.client_id), ("scope", &scope)]);
        let asked = Instant::now();
        let (status, body) = self.send(url, Method::POST, Some(form.as_str())).await?;
        if status != StatusCode::OK {
            return Err(refused(url, status, &body));
        }
        let code: DeviceCode = serde_json::from_slice(&body)
            .map_err(|error| Error::Answer { url: url.clone(), why: answer::place(&error) })?;
        let valid_for = Duration::from_secs(code.expires_in).min(LONGEST_CODE);
        Ok(Pending {
            instructions: Instructions {
                verification_uri: excerpt(&code.verification_uri),
                verification_uri_complete: code.verification_uri_complete.as_deref().map(excerpt),
                user_code: excerpt(&code.user_code),
                valid_for,
            },
            device_code: code.device_code.into(),
            interval: code
                .interval
                .map_or(INTERVAL, Duration::from_secs)
                .clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL),
            until: asked + valid_for,
        })
    }

    /// Waits until the user has entered the code.
    ///
    /// # Errors
    /// See [`Error`].
    ///
    /// # Cancel safety
    /// Cancel safe: the code just expires.
    pub(crate) async fn wait(&self, endpoints: &Endpoints, pending: Pending) -> Result<Granted, Error> {
        let Pending { device_code, mut interval, until, .. } = pending;
        let form = form(&[
            ("grant_type", DEVICE_GRANT),
            ("device_code", device_code.expose_secret()),
            ("client_id", self.client_id),
        ]);
        loop {
            if Instant::now() + interval > until {
                return Err(Error::CodeExpired);
            }
            sleep(interval).await;
            match self.tokens(&endpoints.token, &form).await {
                Ok(granted) => return Ok(granted),
                Err(error) => interval = next_interval(interval, error)?,
            }
        }
    }

    /// Gets a new ID token. `token_endpoint` is that of the discovery.
    ///
    /// # Errors
    /// See [`Error`], and [`Error::needs_login`].
    pub(crate) async fn refresh(
        &self,
        token_endpoint: &str,
        refresh_token: &SecretString,
    ) -> Result<Granted, Error> {
        let form = form(&[
            ("grant_type", "refresh_token"),
            ("refresh_token", refresh_token.expose_secret()),
            ("client_id", self.client_id),
        ]);
        self.tokens(token_endpoint, &form).await
    }

    /// Makes a refresh token invalid.
    ///
    /// # Errors
    /// See [`Error`].
    pub(crate) async fn revoke(&self, endpoint: &str, refresh_token: &SecretString) -> Result<(), Error> {
        let form = form(&[
            ("token", refresh_token.expose_secret()),
            ("token_type_hint", "refresh_token"),
            ("client_id", self.client_id),
        ]);
        let (status, body) = self.send(endpoint, Method::POST, Some(form.as_str())).await?;
        if status.is_success() { Ok(()) } else { Err(refused(endpoint, status, &body)) }
    }

    async fn tokens(&self, url: &str, form: &str) -> Result<Granted, Error> {
        let (status, body) = self.send(url, Method::POST, Some(form)).await?;
        if status != StatusCode::OK {
            return Err(refused(url, status, &body));
        }
        // The error omits the text, which has tokens.
        let Tokens { id_token, refresh_token } = serde_json::from_slice(&body)
            .map_err(|error| Error::Answer { url: url.to_owned(), why: answer::place(&error) })?;
        let not = |why| Error::IdToken { issuer: self.issuer.clone(), why };
        let id_token = id_token.ok_or_else(|| not(NotIdToken::Missing))?;
        let id_token = IdToken::parse(id_token.into()).map_err(not)?;
        // The token comes from the issuer itself, so its signature needs no check (OpenID Connect Core
        // 3.1.3.7).
        id_token.check(self.issuer.as_str(), self.client_id).map_err(not)?;
        Ok(Granted { id_token, refresh_token: refresh_token.map(Into::into) })
    }

    async fn send(
        &self,
        url: &str,
        method: Method,
        form: Option<&str>,
    ) -> Result<(StatusCode, Zeroizing<Vec<u8>>), Error> {
        let mut request =
            Request::builder().method(method).uri(url).header(header::ACCEPT, "application/json");
        if form.is_some() {
            request = request.header(header::CONTENT_TYPE, FORM);
        }
        let body = Full::new(Bytes::from(form.unwrap_or_default().to_owned()));
        let request = request.body(body);
        let request =
            request.map_err(|error| Error::Answer { url: url.to_owned(), why: error.to_string() })?;
        let sent = send_within(TIMEOUT, self.tls, request, LARGEST).await;
        let response = sent.map_err(|error| match error {
            https::Error::Connect(why) => Error::Connect { url: url.to_owned(), why },
            https::Error::Response(why) => Error::Away { url: url.to_owned(), why },
            error @ https::Error::CaFile(_) => Error::CaFile(error),
        })?;
        Ok((response.status(), Zeroizing::new(response.into_body().into())))
    }
}

/// Returns the next interval of polls after one failed.
///
/// # Errors
/// Waiting longer is useless.
fn next_interval(interval: Duration, error: Error) -> Result<Duration, Error> {
    let next = match &error {
        Error::Refused { answer, .. } => match answer.error.as_str() {
            "authorization_pending" => return Ok(interval),
            "slow_down" => interval + SLOW_DOWN,
            "access_denied" => return Err(Error::Denied),
            "expired_token" => return Err(Error::CodeExpired),
            _ => return Err(error),
        },
        _ if error.is_unreachable() => interval * 2,
        _ => return Err(error),
    };
    Ok(next.min(LONGEST_INTERVAL))
}

/// Returns the scopes to request.
fn scope(given: &[String], supported: Option<&[String]>) -> String {
    let mut scopes = vec!["openid"];
    match (given, supported) {
        ([], Some(supported)) => {
            scopes.extend(USUAL_SCOPES.iter().filter(|usual| supported.iter().any(|one| one == *usual)));
        }
        ([], None) => scopes.extend(BLIND_SCOPES),
        (given, _) => scopes.extend(given.iter().map(String::as_str).filter(|scope| *scope != "openid")),
    }
    scopes.join(" ")
}

/// Returns a form. It may have secrets.
fn form(fields: &[(&str, &str)]) -> Zeroizing<String> {
    let mut form = Zeroizing::new(String::new());
    for (name, value) in fields {
        if !form.is_empty() {
            form.push('&');
        }
        form.push_str(name);
        form.push('=');
        form.extend(utf8_percent_encode(value, ESCAPED));
    }
    form
}

/// Returns what an answer that is no success means.
fn refused(url: &str, status: StatusCode, body: &[u8]) -> Error {
    let url = url.to_owned();
    match serde_json::from_slice::<ErrorAnswer>(body) {
        Ok(answer) if !status.is_server_error() => Error::Refused { url, answer },
        _ if status.is_server_error() => Error::Away { url, why: format!("HTTP {status}") },
        _ => Error::Answer { url, why: format!("HTTP {status}") },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(error: &str) -> Error {
        Error::Refused {
            url: "https://i".into(),
            answer: ErrorAnswer { error: error.into(), description: None },
        }
    }

    #[test]
    fn polls_become_slower_when_the_issuer_asks_for_it_or_is_away() {
        let second = Duration::from_secs(1);
        let next = |interval, error| next_interval(interval, error);
        assert_eq!(next(second, said("authorization_pending")).unwrap(), second);
        assert_eq!(next(second, said("slow_down")).unwrap(), 6 * second);
        let away = || Error::Connect { url: String::new(), why: String::new() };
        assert_eq!(next(second, away()).unwrap(), 2 * second);
        assert_eq!(next(50 * second, away()).unwrap(), LONGEST_INTERVAL);
        assert!(matches!(next(second, said("access_denied")), Err(Error::Denied)));
        assert!(matches!(next(second, said("expired_token")), Err(Error::CodeExpired)));
        assert!(matches!(next(second, said("invalid_client")), Err(Error::Refused { .. })));
    }

    #[test]
    fn scopes_are_those_that_the_issuer_has() {
        let list = |scopes: &[&str]| scopes.iter().map(|&scope| scope.to_owned()).collect::<Vec<_>>();
        assert_eq!(scope(&[], None), "openid offline_access");
        assert_eq!(scope(&[], Some(&list(&["openid", "email", "admin"]))), "openid email");
        assert_eq!(scope(&list(&["a", "openid"]), Some(&[])), "openid a");
    }

    #[test]
    fn forms_are_escaped() {
        let form = form(&[("client_id", "a b&c=ä"), ("scope", "openid x")]);
        assert_eq!(form.as_str(), "client_id=a%20b%26c%3D%C3%A4&scope=openid%20x");
    }

    #[test]
    fn texts_of_the_issuer_are_shown_on_one_short_line() {
        let body =
            format!("{{\"error\":\"invalid_grant\",\"error_description\":\"a\\nb{}\"}}", "x".repeat(1000));
        let error = refused("https://i/token", StatusCode::BAD_REQUEST, body.as_bytes());
        assert!(error.needs_login());
        let text = error.to_string();
        assert!(text.starts_with("the issuer at https://i/token refused: invalid_grant (a\\nbxx"), "{text}");
        assert!(text.len() < 500, "{text}");
        let other = refused("https://i", StatusCode::BAD_GATEWAY, b"<html>").to_string();
        assert_eq!(other, "the issuer at https://i did not answer: HTTP 502 Bad Gateway");
        let other = refused("https://i", StatusCode::NOT_FOUND, b"<html>").to_string();
        assert_eq!(other, "the issuer at https://i did not answer as expected: HTTP 404 Not Found");
    }
}
