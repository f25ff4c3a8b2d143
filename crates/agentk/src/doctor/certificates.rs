//! Describes certificates and their problems.

use std::io;

use rustls::{
    CertificateError,
    pki_types::{CertificateDer, ServerName},
};
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

/// How many names of a certificate are shown.
const NAMES: usize = 5;

/// Describes a certificate: its names, its issuer, and its expiry.
pub(super) fn describe(chain: &[CertificateDer<'_>]) -> String {
    let Some(own) = chain.first() else { return "no certificate was sent".to_owned() };
    let Ok((_, certificate)) = X509Certificate::from_der(own) else {
        return "the certificate cannot be read".to_owned();
    };
    format!(
        "certificate for {}, issued by {}, valid until {}",
        names(&certificate),
        quoted(&certificate.issuer().to_string()),
        certificate.validity().not_after
    )
}

/// Describes a TLS error, and returns advice.
pub(super) fn explain(
    error: &io::Error,
    name: &ServerName<'_>,
    chain: &[CertificateDer<'_>],
) -> (String, Vec<String>) {
    let wanted = name.to_str();
    let shown = describe(chain);
    let own = chain.first().and_then(|own| Some(X509Certificate::from_der(own).ok()?.1));
    let issuer = own.as_ref().map_or("unknown".to_owned(), |own| quoted(&own.issuer().to_string()));
    let cause = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    match cause {
        Some(rustls::Error::InvalidCertificate(wrong)) => match wrong {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                let mut advice = vec![format!(
                    "if the CA {issuer} can be trusted, give its certificate with --ca-cert-file FILE"
                )];
                if chain.len() == 1 && own.as_ref().is_some_and(|own| own.issuer() != own.subject()) {
                    advice.push(
                        "the server sent only its own certificate: if there is an intermediate CA, the server must send \
                         the whole chain"
                            .to_owned(),
                    );
                }
                advice.push(
                    "if this is the CA of a proxy that inspects TLS, that proxy answers here".to_owned(),
                );
                (format!("the certificate is not issued by a CA that this machine trusts: {shown}"), advice)
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => (
                format!("the certificate is not for {wanted}: {shown}"),
                vec![format!(
                    "use a name of the certificate in --kas-address, or give one with --kas-tls-server-name NAME"
                )],
            ),
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                // Find the expired certificate of the chain.
                let expired = chain
                    .iter()
                    .filter_map(|der| Some(X509Certificate::from_der(der).ok()?.1))
                    .find(|certificate| !certificate.validity().is_valid());
                let whose = expired.map_or(shown, |certificate| {
                    format!(
                        "that of {} expired on {}",
                        quoted(&certificate.subject().to_string()),
                        certificate.validity().not_after
                    )
                });
                (
                    format!("the certificate has expired: {whose}"),
                    vec!["renew it on the server; if it has not expired, the clock of this machine is wrong".to_owned()],
                )
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => (
                format!("the certificate is not valid yet: {shown}"),
                vec!["check the clock of this machine and that of the CA".to_owned()],
            ),
            other => (format!("the certificate cannot be used ({other}): {shown}"), Vec::new()),
        },
        Some(rustls::Error::InvalidMessage(_)) => (
            "the server does not speak TLS".to_owned(),
            vec!["check the port; without TLS the address starts with grpc:// or ws://".to_owned()],
        ),
        Some(other) => (format!("TLS failed: {other}"), Vec::new()),
        None => (
            format!("the connection was closed during the TLS handshake: {error}"),
            vec![
                "a firewall that filters by name does this, and so does a server without TLS: without TLS the address \
                 starts with grpc:// or ws://"
                    .to_owned(),
            ],
        ),
    }
}

/// Returns the names of a certificate.
fn names(certificate: &X509Certificate<'_>) -> String {
    let alternatives = certificate.subject_alternative_name().ok().flatten();
    let mut names: Vec<String> = alternatives
        .iter()
        .flat_map(|extension| &extension.value.general_names)
        .filter_map(|name| match name {
            GeneralName::DNSName(name) => Some(clean(name)),
            GeneralName::IPAddress(bytes) => match bytes.len() {
                4 => {
                    <[u8; 4]>::try_from(*bytes).ok().map(|bytes| std::net::Ipv4Addr::from(bytes).to_string())
                }
                16 => {
                    <[u8; 16]>::try_from(*bytes).ok().map(|bytes| std::net::Ipv6Addr::from(bytes).to_string())
                }
                _ => None,
            },
            _ => None,
        })
        .collect();
    let more = names.len().saturating_sub(NAMES);
    names.truncate(NAMES);
    match (names.is_empty(), more) {
        (true, _) => format!("no name (subject {})", quoted(&certificate.subject().to_string())),
        (false, 0) => names.join(", "),
        (false, more) => format!("{} and {more} more", names.join(", ")),
    }
}

/// Makes a peer's text safe for one line of a terminal.
fn clean(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", clean(text))
}
