//! `kasctl login` and `kasctl logout`.

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
    let login = Login::new(&client, &endpoints, granted);
    logins.lock(&login).await?.write(&login)?;
    note(format_args!("logged in to {} as {subject}", args.issuer));
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
/// There is no such login, or its file cannot be removed. An issuer that does not revoke the token causes only
/// a warning.
pub(crate) async fn logout(args: &LogoutArgs) -> Result<Exit, Failure> {
    let logins = Logins::of_user()?;
    let selector = LoginSelector { issuer: args.issuer.clone(), client_id: args.client_id.clone() };
    let locked = logins.lock(&logins.find(&selector)?).await?;
    // Another process may have refreshed it meanwhile.
    let login = locked.read()?.ok_or(Error::NoLogin(selector))?;
    let tls = login.tls();
    let client = Client { issuer: &login.issuer, client_id: &login.client_id, tls: &tls };
    match (&login.revocation_endpoint, login.refresh_token()) {
        (_, None) => {}
        (Some(endpoint), Some(token)) => {
            if let Err(error) = client.revoke(endpoint, token).await {
                note(format_args!("warning: the refresh token stays valid at the issuer: {error}"));
            }
        }
        (None, Some(_)) => note(
            "warning: the issuer has no revocation_endpoint, so the refresh token stays valid there until it expires",
        ),
    }
    locked.remove()?;
    note(format_args!("logged out of {}", login.issuer));
    Ok(Exit::Ok)
}
