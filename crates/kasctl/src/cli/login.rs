//! The commands for logins at OpenID Connect issuers.

use clap::Args;

use crate::oidc::Issuer;

pub(super) const LOGIN_HELP: &str = "\
Examples:
  kasctl login --issuer https://gitlab.example.com --client-id 1234
  kasctl login --issuer https://dex.example.com/dex --client-id kas --ca-file dex-ca.pem
  kasctl login --issuer https://id.example.com --client-id kas --scope groups --scope offline_access
  kasctl kubeconfig --url https://kas.example.com/ --oidc

The command prints a URL and a code. Open the URL in any browser, also on another machine, and enter the code \
(device flow, RFC 8628). The client must be a public one, and be allowed to use the device flow; the configuration of \
kas must have the issuer, and the client id as an audience, in agent.kubernetes_api.oidc.

The tokens are stored in $XDG_STATE_HOME/kasctl/logins, or $HOME/.local/state/kasctl/logins: a file with mode 0600 \
for each issuer and client id. A new login with both replaces it. 'kasctl credential --oidc' gets a new ID token with \
the refresh token when the old one has expired. An issuer that gives no refresh token needs a new login each time.

Without --scope, openid is requested, and which of profile, email, groups and offline_access the issuer has. \
--ca-file and --server-name are for the issuer, and are stored with the login.";

pub(super) const LOGOUT_HELP: &str = "\
Examples:
  kasctl logout                                        the only login
  kasctl logout --issuer https://gitlab.example.com

The refresh token is revoked at the issuer (RFC 7009), if that has an endpoint for it, and the file is removed. The \
file is removed as well if the issuer cannot be reached; a warning then says that the refresh token stays valid. An \
ID token that was printed before stays valid until it expires.";

/// Arguments of `login`.
#[derive(Debug, Args)]
pub(crate) struct LoginArgs {
    /// URL of the issuer, exactly as in its tokens
    #[arg(long, value_name = "URL")]
    pub(crate) issuer: Issuer,
    /// Client id of kas at the issuer
    #[arg(long, value_name = "ID", value_parser = client_id)]
    pub(crate) client_id: String,
    /// Scope to request; may be repeated [default: the usual ones of the issuer]
    #[arg(long = "scope", value_name = "SCOPE", value_parser = scope)]
    pub(crate) scopes: Vec<String>,
}

/// Arguments of `logout`.
#[derive(Debug, Args)]
pub(crate) struct LogoutArgs {
    /// The login at this issuer [default: the only one]
    #[arg(long, value_name = "URL")]
    pub(crate) issuer: Option<Issuer>,
    /// The login with this client id [default: the only one]
    #[arg(long, value_name = "ID")]
    pub(crate) client_id: Option<String>,
}

/// Parses a client id (RFC 6749, A.1).
fn client_id(text: &str) -> Result<String, &'static str> {
    let is_good =
        !text.is_empty() && text.len() <= 1024 && text.bytes().all(|byte| (0x20..0x7f).contains(&byte));
    if is_good { Ok(text.to_owned()) } else { Err("expected 1 to 1024 printable characters of ASCII") }
}

/// Parses a scope (RFC 6749, 3.3).
fn scope(text: &str) -> Result<String, &'static str> {
    let is_good = |byte: u8| byte.is_ascii_graphic() && byte != b'"' && byte != b'\\';
    if !text.is_empty() && text.bytes().all(is_good) {
        Ok(text.to_owned())
    } else {
        Err("expected one scope, without spaces and quotes; repeat the flag for more")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_and_client_ids_are_checked() {
        assert!(scope("https://www.example.com/auth/x").is_ok() && client_id("a b~").is_ok());
        for bad in ["", "a b", "a\"", "a\\", "ä"] {
            assert!(scope(bad).is_err(), "{bad}");
        }
        for bad in ["", "a\n", "ä"] {
            assert!(client_id(bad).is_err(), "{bad}");
        }
    }
}
