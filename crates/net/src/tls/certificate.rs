//! The validity and the roles of a certificate.

use std::{fmt, str::FromStr, time::Duration};

use rustls_pki_types::CertificateDer;
use x509_parser::{
    extensions::GeneralName,
    prelude::{FromDer as _, X509Certificate},
};

/// The bytes are not an X.509 certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is no X.509 certificate")]
pub struct Malformed;

fn parse<'a>(certificate: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, Malformed> {
    X509Certificate::from_der(certificate).map(|(_, parsed)| parsed).map_err(|_| Malformed)
}

/// When the certificates of a file expire. Times are since 1970, and never before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// The first certificate.
    pub leaf: Duration,
    /// The one that expires first.
    pub first: Duration,
    /// The one that expires last.
    pub last: Duration,
}

impl Validity {
    /// Reads the validity of a chain, leaf first. `None`: the chain is empty.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn of(chain: &[CertificateDer<'_>]) -> Result<Option<Self>, Malformed> {
        let mut validity: Option<Self> = None;
        for certificate in chain {
            let end = parse(certificate)?.validity().not_after.timestamp();
            let end = Duration::from_secs(u64::try_from(end).unwrap_or(0));
            validity = Some(match validity {
                None => Self { leaf: end, first: end, last: end },
                Some(Self { leaf, first, last }) => Self { leaf, first: first.min(end), last: last.max(end) },
            });
        }
        Ok(validity)
    }
}

/// The role of a certificate: a URI among its subject alternative names.
///
/// It is compared as a whole, byte by byte, without wildcards on either side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Role(Box<str>);

/// Why a text is not a role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum NotRole {
    #[error("a wildcard, with which every certificate of the authority would do")]
    Wildcard,
    #[error("no URI of at most 255 printable ASCII characters with a scheme and `://`")]
    NotUri,
}

impl FromStr for Role {
    type Err = NotRole;

    fn from_str(text: &str) -> Result<Self, NotRole> {
        if text.contains('*') {
            return Err(NotRole::Wildcard);
        }
        let is_scheme = |scheme: &str| {
            scheme.starts_with(|c: char| c.is_ascii_alphabetic())
                && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
        };
        let is_uri = text.len() <= 255
            && text.bytes().all(|b| b.is_ascii_graphic())
            && text.split_once("://").is_some_and(|(scheme, rest)| is_scheme(scheme) && !rest.is_empty());
        if is_uri { Ok(Self(text.into())) } else { Err(NotRole::NotUri) }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a certificate does not have a role.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WrongRole {
    /// It has other roles, or none.
    #[error(
        "its certificate lacks the role {role}: a URI among the subject alternative names; it has {}",
        if found.is_empty() { "no URI".to_owned() } else { found.join(", ") }
    )]
    Lacks {
        /// The required role.
        role: Role,
        /// Its roles, shortened.
        found: Vec<String>,
    },
    /// It cannot be parsed.
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

/// The most roles of a certificate in an error, and the most characters of each.
const SHOWN: (usize, usize) = (4, 100);

impl Role {
    /// Checks that a certificate has this role.
    ///
    /// # Errors
    /// [`WrongRole`], with the roles that it has.
    pub fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), WrongRole> {
        let parsed = parse(certificate)?;
        let names = parsed.subject_alternative_name().map_err(|_| Malformed)?;
        let uris = names.iter().flat_map(|names| &names.value.general_names).filter_map(|name| match name {
            GeneralName::URI(uri) => Some(*uri),
            _ => None,
        });
        if uris.clone().any(|uri| uri == &*self.0) {
            return Ok(());
        }
        let shown = |uri: &str| uri.escape_debug().take(SHOWN.1).collect();
        Err(WrongRole::Lacks { role: self.clone(), found: uris.take(SHOWN.0).map(shown).collect() })
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use rcgen::{CertificateParams, KeyPair, SanType};

    use super::*;

    fn certificate(uris: &[&str], until: Duration) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(vec!["kas.example.com".to_owned()]).unwrap();
        params.subject_alt_names.extend(uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())));
        params.not_after = (SystemTime::UNIX_EPOCH + until).into();
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    const YEAR_2100: Duration = Duration::from_secs(4_102_444_800);

    #[test]
    fn a_role_is_one_whole_uri_of_the_certificate() {
        let role: Role = "kas://replica".parse().unwrap();
        let with = |uris: &[&str]| role.check(&certificate(uris, YEAR_2100));
        assert_eq!(with(&["kas://replica"]), Ok(()));
        assert_eq!(with(&["spiffe://a/b", "kas://replica"]), Ok(()));
        for uris in [
            &[][..],
            &["kas://replica/"],
            &["kas://replicas"],
            &["KAS://replica"],
            &["kas://*"],
            &["*"],
            &["kas://agent"],
        ] {
            let error = with(uris).unwrap_err().to_string();
            assert!(error.contains("lacks the role kas://replica"), "{error}");
            let found = if uris.is_empty() { "no URI" } else { uris[0] };
            assert!(error.ends_with(&format!("it has {found}")), "{error}");
        }
        assert_eq!(role.check(&CertificateDer::from(vec![1, 2, 3])), Err(WrongRole::Malformed(Malformed)));
    }

    #[test]
    fn roles_of_a_peer_are_shown_short_and_on_one_line() {
        let role: Role = "kas://replica".parse().unwrap();
        let long = format!("x://{}", "a".repeat(1_000));
        let error = role.check(&certificate(&[long.as_str(); 50], YEAR_2100)).unwrap_err().to_string();
        assert!(error.len() < 600 && !error.contains('\n'), "{error}");
    }

    #[test]
    fn wildcards_and_invalid_uris_are_not_roles() {
        for text in ["*", "kas://*", "kas://replica*", "*://replica"] {
            assert_eq!(text.parse::<Role>(), Err(NotRole::Wildcard), "{text}");
        }
        let long = format!("x://{}", "a".repeat(300));
        for text in ["", "replica", "://x", "kas://", "kas://a b", "1x://y", "kas://é", &long] {
            assert_eq!(text.parse::<Role>(), Err(NotRole::NotUri), "{text}");
        }
        for text in ["kas://replica", "spiffe://example.org/ns/kas/sa/kas", "urn+x://1"] {
            assert_eq!(text.parse::<Role>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn validity_has_the_leaf_and_the_first_and_last_to_expire() {
        let [a, b, c] = [30, 10, 20].map(|days| YEAR_2100 + Duration::from_secs(86_400 * days));
        let chain = [a, b, c].map(|until| certificate(&[], until));
        assert_eq!(Validity::of(&chain), Ok(Some(Validity { leaf: a, first: b, last: a })));
        assert_eq!(Validity::of(&[]), Ok(None));
        assert_eq!(Validity::of(&[CertificateDer::from(vec![0x30])]), Err(Malformed));
    }
}
