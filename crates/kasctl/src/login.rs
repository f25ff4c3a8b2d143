//! `kasctl login` and `kasctl logout`.

use secrecy::SecretString;
use tokio::signal::ctrl_c;

use crate::{
    cli::{LoginArgs, LogoutArgs},
    duration::humane,
    failure::{Exit, Failure},
    file_error::FileError,
    link::TlsOptions,
    login_session::{Error, Login, LoginSelector, Logins},
    oidc::{Client, Endpoints, Granted, Instructions},
    output::note,
    table::printable,
};

/// Logs in with a browser and stores the tokens.
///
/// # Errors
/// The issuer cannot be reached, or does not offer this; or the user has refused or was too late. Nothing is
/// stored then, and an earlier login stays.
pub(crate) async fn login(args: &LoginArgs, mut tls: TlsOptions) -> Result<Exit, Failure> {
    let logins = Logins::of_user()?;
    // Reported before anybody opens a browser.
    logins.prepare()?;
    if let Some(file) = &mut tls.ca_file {
        // kubectl runs the plugin in any folder.
        *file = std::path::absolute(&*file).map_err(|cause| FileError {
            verb: "find",
            path: file.clone(),
            cause,
        })?;
    }
    let client = Client { issuer: &args.issuer, client_id: &args.client_id, tls: &tls };
    let (endpoints, granted) = tokio::select! {
        granted = device_flow(&client, &args.scopes) => granted?,
        _ = ctrl_c() => return Err(Failure::Interrupted),
    };
    let subject = printable(granted.id_token.subject());
    let can_be_refreshed = granted.refresh_token.is_some();
    let mut login = Login::new(&client, &endpoints, granted);
    let locked = logins.lock(&login).await?;
    let (earlier, forgotten) = match locked.read() {
        Ok(Some(earlier)) => login.replaces(earlier),
        Ok(None) => (0, Vec::new()),
        // The new login mends that.
        Err(error) => {
            note(format_args!(
                "warning: a refresh token of an earlier login may stay valid at the issuer: {error}"
            ));
            (0, Vec::new())
        }
    };
    locked.write(&login)?;
    note(format_args!("logged in to {} as {subject}", args.issuer));
    if earlier > 0 {
        note(
            "the refresh token of the earlier login may stay valid at the issuer until 'kasctl logout' revokes it",
        );
    }
    for token in &forgotten {
        revoke(&client, login.revocation_endpoint.as_deref(), token).await;
    }
    if !can_be_refreshed {
        note(
            "warning: the issuer gave no refresh token, so the login ends with its ID token; does the client have the \
             scope offline_access?",
        );
    }
    Ok(Exit::Ok)
}

async fn device_flow(client: &Client<'_>, scopes: &[String]) -> Result<(Endpoints, Granted), Error> {
    let endpoints = client.discover().await?;
    let pending = client.begin(&endpoints, scopes).await?;
    let Instructions { verification_uri, verification_uri_complete, user_code, valid_for } =
        &pending.instructions;
    note(format_args!(
        "open {verification_uri} in a browser and enter the code {user_code} (valid for {})",
        humane(*valid_for)
    ));
    if let Some(complete) = verification_uri_complete {
        note(format_args!("or open {complete} and compare the code"));
    }
    let granted = client.wait(&endpoints, pending).await?;
    Ok((endpoints, granted))
}

/// Ends a login.
///
/// # Errors
/// There is no such login, or its file cannot be removed. An issuer that does not revoke the token causes
/// only a warning.
pub(crate) async fn logout(args: &LogoutArgs) -> Result<Exit, Failure> {
    let logins = Logins::of_user()?;
    let selector = LoginSelector { issuer: args.issuer.clone(), client_id: args.client_id.clone() };
    let locked = logins.lock(&logins.find(&selector)?).await?;
    // Another process may have refreshed it meanwhile.
    let login = locked.read()?.ok_or(Error::NoLogin(selector))?;
    let tls = login.tls();
    let client = Client { issuer: &login.issuer, client_id: &login.client_id, tls: &tls };
    for token in login.refresh_tokens() {
        revoke(&client, login.revocation_endpoint.as_deref(), token).await;
    }
    locked.remove()?;
    note(format_args!("logged out of {}", login.issuer));
    Ok(Exit::Ok)
}

/// Revokes a refresh token at the issuer, or warns that it stays valid.
async fn revoke(client: &Client<'_>, endpoint: Option<&str>, token: &SecretString) {
    match endpoint {
        Some(endpoint) => {
            if let Err(error) = client.revoke(endpoint, token).await {
                note(format_args!("warning: a refresh token stays valid at the issuer: {error}"));
            }
        }
        None => note(
            "warning: the issuer has no revocation_endpoint, so a refresh token stays valid there until it expires",
        ),
    }
}
