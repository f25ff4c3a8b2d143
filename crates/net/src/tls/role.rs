//! Verifiers that also require a role in the certificate of the other side.
//!
//! A signature of the right CA is not enough, since a CA often signs for more than one purpose.

use std::{fmt, sync::Arc};

use rustls::{
    CertificateError, DistinguishedName, Error, OtherError,
    client::danger::{ServerCertVerified, ServerCertVerifier},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use super::certificate::{Role, WrongRole};

/// Implements the methods for signatures of a verifier that wraps another one in the field `$inner`.
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

/// The library prints other causes with `Debug`, so that has to be readable too.
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

/// Verifies clients.
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

/// Verifies servers.
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
