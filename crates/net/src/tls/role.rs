//! Verifiers that, after everything that they check anyway, look for a role in the other side's certificate.
//!
//! To be signed by the right authority is not enough: an authority often signs for more than one purpose.

use std::{fmt, sync::Arc};

use rustls::{
    CertificateError, DistinguishedName, Error, OtherError,
    client::danger::{ServerCertVerified, ServerCertVerifier},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use super::certificate::{Role, WrongRole};

/// What a verifier around another one says of signatures: the same as that, in the field `$inner`.
macro_rules! signatures_by {
    ($inner:ident) => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &::rustls_pki_types::CertificateDer<'_>,
            signature: &::rustls::DigitallySignedStruct,
        ) -> Result<::rustls::client::danger::HandshakeSignatureValid, ::rustls::Error> {
            self.$inner.verify_tls12_signature(message, certificate, signature)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &::rustls_pki_types::CertificateDer<'_>,
            signature: &::rustls::DigitallySignedStruct,
        ) -> Result<::rustls::client::danger::HandshakeSignatureValid, ::rustls::Error> {
            self.$inner.verify_tls13_signature(message, certificate, signature)
        }

        fn supported_verify_schemes(&self) -> Vec<::rustls::SignatureScheme> {
            self.$inner.supported_verify_schemes()
        }
    };
}
pub(super) use signatures_by;

/// The library shows the causes of others by `Debug`: this is for people all the same.
struct Said(WrongRole);

impl fmt::Debug for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl std::error::Error for Said {}

impl Role {
    fn verify(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        self.check(certificate)
            .map_err(|wrong| CertificateError::Other(OtherError(Arc::new(Said(wrong)))).into())
    }
}

/// Of clients.
#[derive(Debug)]
pub(super) struct ClientRole {
    pub(super) inner: Arc<dyn ClientCertVerifier>,
    pub(super) role: Role,
}

impl ClientCertVerifier for ClientRole {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.inner.verify_client_cert(end_entity, intermediates, now)?;
        self.role.verify(end_entity)?;
        Ok(verified)
    }

    signatures_by!(inner);
}

/// Of servers.
#[derive(Debug)]
pub(super) struct ServerRole {
    pub(super) inner: Arc<dyn ServerCertVerifier>,
    pub(super) role: Role,
}

impl ServerCertVerifier for ServerRole {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified =
            self.inner.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)?;
        self.role.verify(end_entity)?;
        Ok(verified)
    }

    signatures_by!(inner);
}
