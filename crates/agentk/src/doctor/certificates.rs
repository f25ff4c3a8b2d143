//! What is wrong with a certificate, in words.

use std::io;

use rustls::{
    CertificateError,
    pki_types::{CertificateDer, ServerName},
};
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

/// So many names of a certificate are told.
const NAMES: usize = 5;

/// Says whose certificate it is, who signed it, and until when it is good.
pub(super) fn describe(chain: &[CertificateDer<'_>]) -> String {
    let Some(own) = chain.first() else { return "no certificate was shown".to_owned() };
    let Ok((_, certificate)) = X509Certificate::from_der(own) else {
        return "the certificate cannot be read".to_owned();
    };
    format!(
        "certificate for {}, signed by {}, good until {}",
        names(&certificate),
        quoted(&certificate.issuer().to_string()),
        certificate.validity().not_after
    )
}

/// Returns what is wrong, and what to do.
pub(super) fn explain(
    error: &io::Error,
    name: &ServerName<'_>,
    chain: &[CertificateDer<'_>],
) -> (String, Vec<String>) {
    let wanted = name.to_str();
    let shown = describe(chain);
    let own = chain.first().and_then(|own| Some(X509Certificate::from_der(own).ok()?.1));
    let issuer = own.as_ref().map_or("nobody".to_owned(), |own| quoted(&own.issuer().to_string()));
    let cause = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    match cause {
        Some(rustls::Error::InvalidCertificate(wrong)) => match wrong {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                let mut advice = vec![format!(
                    "give the certificate of the CA {issuer} with --ca-cert-file FILE, if it is one to be trusted"
                )];
                if chain.len() == 1 && own.as_ref().is_some_and(|own| own.issuer() != own.subject()) {
                    advice.push(
                        "the server sent its own certificate alone: if another CA signed that of the CA, the server \
                         must send the whole chain"
                            .to_owned(),
                    );
                }
                advice.push(
                    "if this is the CA of a proxy that looks into TLS, it is that proxy which answers here".to_owned(),
                );
                (format!("nobody whom this machine trusts has signed the certificate: {shown}"), advice)
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => (
                format!("the certificate is not for {wanted}: {shown}"),
                vec![format!(
                    "dial kas by a name of its certificate, or say with --kas-tls-server-name NAME which one it has"
                )],
            ),
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                // Which one of the chain it is.
                let expired = chain
                    .iter()
                    .filter_map(|der| Some(X509Certificate::from_der(der).ok()?.1))
                    .find(|certificate| !certificate.validity().is_valid());
                let whose = expired.map_or(shown, |certificate| {
                    format!(
                        "that of {} ended {}",
                        quoted(&certificate.subject().to_string()),
                        certificate.validity().not_after
                    )
                });
                (
                    format!("the certificate has expired: {whose}"),
                    vec!["renew it at the server; if it is not expired, this machine's clock is wrong".to_owned()],
                )
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => (
                format!("the certificate is not valid yet: {shown}"),
                vec!["set this machine's clock, or that of the CA".to_owned()],
            ),
            other => (format!("the certificate cannot be used ({other}): {shown}"), Vec::new()),
        },
        Some(rustls::Error::InvalidMessage(_)) => (
            "what answers there does not speak TLS".to_owned(),
            vec!["is it the right port? Without TLS the address begins with grpc:// or ws://".to_owned()],
        ),
        Some(other) => (format!("TLS failed: {other}"), Vec::new()),
        None => (
            format!("the connection was closed during the TLS handshake: {error}"),
            vec![
                "a firewall that cuts by name does this, and a server that speaks no TLS: without TLS the address begins \
                 with grpc:// or ws://"
                    .to_owned(),
            ],
        ),
    }
}

/// Returns the names that a certificate is for.
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
        (true, _) => format!("no name at all (subject {})", quoted(&certificate.subject().to_string())),
        (false, 0) => names.join(", "),
        (false, more) => format!("{} and {more} more", names.join(", ")),
    }
}

/// What a peer wrote, on one line of a terminal.
fn clean(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", clean(text))
}
