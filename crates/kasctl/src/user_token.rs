//! Tokens for the Kubernetes API endpoint, and what they say about themselves. No I/O.

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use secrecy::{ExposeSecret as _, SecretString, zeroize::Zeroizing};
use serde::{Deserialize, de::DeserializeOwned};

use crate::table::excerpt;

/// The longest token that kas accepts, in bytes.
pub(crate) const LONGEST: usize = 16 * 1024;
/// A token counts as expired so long before its end, so that it does not expire on its way.
const EARLY: Duration = Duration::from_secs(30);

/// A token, as it is sent.
#[derive(Debug)]
pub(crate) struct Token {
    text: SecretString,
    /// When it expires, since 1970; `None`: not known.
    expires: Option<Duration>,
}

impl Token {
    /// Returns a token that expires at this time since 1970; `None`: not known.
    pub(crate) fn new(text: SecretString, expires: Option<Duration>) -> Self {
        Self { text, expires }
    }

    /// Returns the token.
    pub(crate) fn expose(&self) -> &str {
        self.text.expose_secret()
    }

    /// Returns the time since 1970 after which it must not be used; `None`: not known.
    pub(crate) fn usable_until(&self) -> Option<Duration> {
        self.expires.map(|expires| expires.saturating_sub(EARLY))
    }

    /// Whether it may be used at this time since 1970.
    pub(crate) fn is_usable_at(&self, now: Duration) -> bool {
        self.usable_until().is_none_or(|until| until > now)
    }
}

/// Why a text is not an ID token of a login.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotIdToken {
    /// There is none.
    #[error("there is none in its answer")]
    Missing,
    /// Another form, or without these claims.
    #[error("it is not a JWT with the claims iss, sub, aud and exp, of at most 16384 bytes")]
    Form,
    /// It is of another issuer.
    #[error("its issuer is {0}")]
    Issuer(String),
    /// It is for others.
    #[error("its audience does not contain the client id")]
    Audience,
    /// It is of another user than before.
    #[error("it is of another user than the login")]
    Subject,
}

/// An ID token. It was received from its issuer, so its signature is not checked; kas checks it.
#[derive(Debug, Clone)]
pub(crate) struct IdToken {
    text: SecretString,
    claims: Claims,
}

#[derive(Debug, Clone, Deserialize)]
struct Claims {
    iss: String,
    sub: String,
    aud: Audience,
    exp: f64,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Audience {
    One(String),
    Several(Vec<String>),
}

impl IdToken {
    /// Parses a token.
    ///
    /// # Errors
    /// [`NotIdToken::Form`].
    pub(crate) fn parse(text: SecretString) -> Result<Self, NotIdToken> {
        let parsed = Some(text.expose_secret()).filter(|text| is_token(text)).and_then(claims::<Claims>);
        let claims = parsed.filter(|claims| expiry_of(claims.exp).is_some()).ok_or(NotIdToken::Form)?;
        Ok(Self { text, claims })
    }

    /// Checks that it is of this issuer, and for this client.
    ///
    /// # Errors
    /// See [`NotIdToken`].
    pub(crate) fn check(&self, issuer: &str, client_id: &str) -> Result<(), NotIdToken> {
        if self.claims.iss != issuer {
            return Err(NotIdToken::Issuer(excerpt(&self.claims.iss)));
        }
        let is_for_client = match &self.claims.aud {
            Audience::One(one) => one == client_id,
            Audience::Several(all) => all.iter().any(|one| one == client_id),
        };
        if is_for_client { Ok(()) } else { Err(NotIdToken::Audience) }
    }

    /// Returns the user.
    pub(crate) fn subject(&self) -> &str {
        &self.claims.sub
    }

    /// Returns the text.
    pub(crate) fn text(&self) -> &SecretString {
        &self.text
    }

    /// Returns it as it is sent.
    pub(crate) fn to_token(&self) -> Token {
        Token::new(self.text.clone(), expiry_of(self.claims.exp))
    }
}

/// Whether a text can be a token in a header.
pub(crate) fn is_token(text: &str) -> bool {
    !text.is_empty() && text.len() <= LONGEST && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Returns when a JWT expires, since 1970; `None`: it is not a JWT, or does not say so.
pub(crate) fn expiry(token: &str) -> Option<Duration> {
    #[derive(Deserialize)]
    struct Expiry {
        exp: f64,
    }
    claims(token).and_then(|Expiry { exp }| expiry_of(exp))
}

fn expiry_of(exp: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(exp).ok()
}

/// Returns claims of a JWT, which are not verified.
fn claims<T: DeserializeOwned>(token: &str) -> Option<T> {
    let mut parts = token.split('.');
    let (_, claims, _) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() {
        return None;
    }
    let claims = Zeroizing::new(URL_SAFE_NO_PAD.decode(claims).ok()?);
    serde_json::from_slice(&claims).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jwt(claims: &str) -> String {
        format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims))
    }

    #[test]
    fn only_jwts_say_when_they_expire() {
        assert_eq!(expiry(&jwt("{\"exp\":90}")), Some(Duration::from_secs(90)));
        for other in [
            "kasu_x",
            "a.b",
            "a.b.c.d",
            &jwt("{}"),
            &jwt("[]"),
            &jwt("{\"exp\":-1}"),
            &jwt("{\"exp\":1e300}"),
        ] {
            assert_eq!(expiry(other), None, "{other}");
        }
    }

    #[test]
    fn id_tokens_are_for_one_issuer_and_client() {
        let of = |aud: &str| {
            let claims = format!("{{\"iss\":\"https://i\",\"sub\":\"jane\",\"aud\":{aud},\"exp\":90}}");
            IdToken::parse(jwt(&claims).into()).unwrap()
        };
        for aud in ["\"kas\"", "[\"other\",\"kas\"]"] {
            assert_eq!(of(aud).check("https://i", "kas"), Ok(()));
        }
        assert_eq!(of("[\"other\"]").check("https://i", "kas"), Err(NotIdToken::Audience));
        let other = of("\"kas\"").check("https://other", "kas");
        assert_eq!(other, Err(NotIdToken::Issuer("https://i".to_owned())));
        let token = of("\"kas\"");
        assert_eq!(
            (token.subject(), token.to_token().usable_until()),
            ("jane", Some(Duration::from_secs(60)))
        );
        assert!(token.to_token().is_usable_at(Duration::from_secs(59)));
        assert!(!token.to_token().is_usable_at(Duration::from_secs(60)));
        for bad in ["{}", "{\"iss\":\"i\",\"sub\":\"s\",\"aud\":\"a\"}", "[]"] {
            assert_eq!(IdToken::parse(jwt(bad).into()).err(), Some(NotIdToken::Form), "{bad}");
        }
        assert!(!format!("{token:?}").contains("e30"), "the token is not shown");
    }
}
