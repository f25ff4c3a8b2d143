//! `kasctl kubeconfig`: entries for the agents in a kubeconfig.

use std::{collections::HashSet, env, fs, path::Path, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use ids::{AgentId, Match, Selector};
use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    agent_list::{self, ReachableAgent},
    api::UNARY_TIMEOUT,
    cli::{Format, KubeconfigArgs},
    credential::API_VERSION,
    credential_source::Source,
    endpoint,
    failure::{Exit, Failure},
    file_error::FileError,
    https,
    kas_url::KasUrl,
    kubeconfig_file::{self, LockedFile, PATIENCE},
    kubeconfig_plan::{Plan, Wanted, WantedAgent, plan},
    kubeconfig_text,
    link::TlsOptions,
    output::{Output, note},
    table::{Table, printable},
};

/// What kubectl prints if it does not find the plugin.
const INSTALL_HINT: &str = "kasctl must be in PATH: it prints the credential for kas. With 'kasctl kubeconfig \
                            --no-plugin', kubectl reads a token file itself.";
/// The largest file of authorities, in bytes: kubectl passes it to the plugin in an environment variable, as
/// base64 with at most 128 KiB.
const LARGEST_CA: usize = 64 * 1024;
/// The agent in the token of a CI job that asks for the list, where kas does not use it.
const ANY_AGENT: i64 = 1;

/// The document that `-o json` prints. Field names are stable.
#[derive(Serialize)]
struct Report<'a> {
    kubeconfig: String,
    user: &'a str,
    current_context: Option<&'a str>,
    contexts: Vec<ContextJson<'a>>,
    removed: &'a [String],
}

#[derive(Serialize)]
struct ContextJson<'a> {
    name: &'a str,
    agent_id: i64,
    server: String,
}

/// Writes the entries of agents to a kubeconfig.
///
/// # Errors
/// The agents cannot be listed, or the file cannot be changed. It is as it was then.
pub(crate) async fn run(
    output: &mut Output,
    args: &KubeconfigArgs,
    tls: TlsOptions,
    timeout: Option<Duration>,
    format: Format,
) -> Result<Exit, Failure> {
    let source = args.source.source(args.client_id.as_deref());
    let path = match &args.kubeconfig {
        Some(path) => path.clone(),
        None => kubeconfig_file::default_path(|name| env::var_os(name))?,
    };
    let most = if args.no_plugin { None } else { Some(LARGEST_CA) };
    let authorities = tls.ca_file.as_deref().map(|path| authorities(path, most)).transpose()?;
    let credential = credential(&source, &args.url, args.no_plugin)?;
    let agents = agents(args, &source, &tls, timeout).await?;
    if args.is_used && agents.len() != 1 {
        return Err(Failure::Usage("--use needs exactly one agent: choose it with --agent or a selector"));
    }
    let wanted = Wanted {
        url: &args.url,
        agents,
        is_all: args.agents.is_empty()
            && args.selector.as_ref().is_none_or(|given| *given == Selector::all()),
        authorities,
        server_name: tls.server_name.as_deref(),
        credential,
        is_used: args.is_used,
    };

    // A signal must not leave the lock behind. What follows ends soon.
    let _interrupts = signal(SignalKind::interrupt()).map_err(Failure::Runtime)?;
    let _terminations = signal(SignalKind::terminate()).map_err(Failure::Runtime)?;
    let _hangups = signal(SignalKind::hangup()).map_err(Failure::Runtime)?;
    let plan = change(&path, &wanted).await?;
    report(output, &path, &args.url, &plan, format).await
}

/// Changes the file, under its lock.
async fn change(path: &Path, wanted: &Wanted<'_>) -> Result<Plan, kubeconfig_file::Error> {
    let not = |cause| kubeconfig_file::Error::NotUnderstood { path: path.to_owned(), cause };
    let mut file = LockedFile::lock(path, PATIENCE).await?;
    let old = file.read()?;
    let root = kubeconfig_text::parse(&old).map_err(not)?;
    let plan = plan(&root, wanted).map_err(not)?;
    let new = kubeconfig_text::apply(&old, &root, &plan.changes).map_err(not)?;
    // Also if it is the same, for its mode.
    file.write(&new)?;
    Ok(plan)
}

async fn report(
    output: &mut Output,
    path: &Path,
    url: &KasUrl,
    plan: &Plan,
    format: Format,
) -> Result<Exit, Failure> {
    match format {
        Format::Json => {
            let contexts = plan.contexts.iter().map(|context| ContextJson {
                name: &context.name,
                agent_id: context.agent.get(),
                server: url.server(context.agent),
            });
            let report = Report {
                kubeconfig: path.display().to_string(),
                user: &plan.user,
                current_context: plan.current.as_deref(),
                contexts: contexts.collect(),
                removed: &plan.removed,
            };
            output.json_document(&report).await?;
        }
        Format::Table => {
            const TITLES: [&str; 3] = ["CONTEXT", "AGENT", "SERVER"];
            let mut rows = vec![TITLES.map(str::to_owned)];
            rows.extend(
                plan.contexts.iter().map(|context| {
                    [context.name.clone(), context.agent.to_string(), url.server(context.agent)]
                }),
            );
            output.write(Table::new(TITLES).rows(&rows).as_bytes()).await?;
            for name in &plan.removed {
                note(format_args!("removed the context {}: its agent is not listed", printable(name)));
            }
        }
    }
    if let Some(current) = plan.current.as_ref().filter(|current| plan.removed.contains(current)) {
        note(format_args!("warning: the current context {} was removed", printable(current)));
    }
    Ok(Exit::Ok)
}

/// Returns the agents that get a context.
async fn agents(
    args: &KubeconfigArgs,
    source: &Source,
    tls: &TlsOptions,
    timeout: Option<Duration>,
) -> Result<Vec<WantedAgent>, Failure> {
    if !args.agents.is_empty() {
        let mut seen = HashSet::new();
        let wanted = args.agents.iter().filter(|agent| seen.insert(**agent));
        return Ok(wanted.map(|&id| WantedAgent { id, name: None }).collect());
    }
    if matches!(source, Source::PatFile(_)) {
        return Err(Failure::Usage("--pat-file needs --agent: GitLab cannot list the agents of a user"));
    }
    let token = source.token(AgentId::new(ANY_AGENT).ok(), process::clock::wall()).await?;
    let listed = agent_list::fetch(&args.url, tls, &token, timeout.unwrap_or(UNARY_TIMEOUT)).await?;
    let agents = selected(args.selector.as_ref(), listed);
    if agents.is_empty() { Err(Failure::NoAgents) } else { Ok(agents) }
}

fn selected(selector: Option<&Selector>, listed: Vec<ReachableAgent>) -> Vec<WantedAgent> {
    let mut seen = HashSet::new();
    let mut agents = Vec::new();
    for ReachableAgent { id, name, project_id } in listed {
        let found = selector.map_or(Match::Yes, |selector| selector.matches(id, project_id, name.as_deref()));
        match found {
            Match::Yes if seen.insert(id) => agents.push(WantedAgent { id, name }),
            Match::Yes | Match::No => {}
            Match::Unknown => note(format_args!(
                "warning: agent {id} was left out: kas does not know its name or project yet; --agent {id} adds it"
            )),
        }
    }
    agents
}

/// Returns the certificates of a PEM file as base64. In PEM they have at most `most` bytes, unless that is
/// `None`.
fn authorities(path: &Path, most: Option<usize>) -> Result<String, Failure> {
    // Checked here, because kubectl would report it with every call.
    let checked = net::tls::client(Some(path)).map_err(https::Error::CaFile);
    checked.map_err(endpoint::Error::CaFile)?;
    // Not the file itself: it may also have a private key, and kubeconfigs are passed on.
    let certificates = net::tls::certificates(path).map_err(https::Error::CaFile);
    let text = pem(&certificates.map_err(endpoint::Error::CaFile)?);
    if most.is_some_and(|most| text.len() > most) {
        return Err(Failure::LargeCaFile { path: path.to_owned(), bytes: text.len() });
    }
    Ok(STANDARD.encode(text))
}

/// Returns certificates in PEM (RFC 7468).
fn pem<T: AsRef<[u8]>>(certificates: &[T]) -> String {
    /// The characters of a line.
    const LINE: usize = 64;
    let mut text = String::new();
    for certificate in certificates {
        text.push_str("-----BEGIN CERTIFICATE-----\n");
        let encoded = STANDARD.encode(certificate);
        let mut rest = &*encoded;
        while !rest.is_empty() {
            // It is ASCII.
            let (line, others) = rest.split_at(rest.len().min(LINE));
            text.push_str(line);
            text.push('\n');
            rest = others;
        }
        text.push_str("-----END CERTIFICATE-----\n");
    }
    text
}

/// Returns the keys of the user.
fn credential(source: &Source, url: &KasUrl, no_plugin: bool) -> Result<Map<String, Value>, Failure> {
    let flags = source.flags()?;
    let flags = flags.ok_or(Failure::Usage("the path of the credential is not UTF-8, as a kubeconfig is"))?;
    let mut user = Map::new();
    if no_plugin {
        // The flag needs --token-file, so the last one is its path.
        user.insert("tokenFile".to_owned(), flags.last().map_or(Value::Null, |path| path.as_str().into()));
        return Ok(user);
    }
    let mut arguments = vec!["credential".to_owned(), "--url".to_owned(), url.to_string()];
    arguments.extend(flags);
    let exec = json!({
        "apiVersion": API_VERSION,
        "args": arguments,
        "command": program()?,
        // kubectl writes this key always, and then nothing changes.
        "env": null,
        "installHint": INSTALL_HINT,
        "interactiveMode": "Never",
        "provideClusterInfo": true,
    });
    user.insert("exec".to_owned(), exec);
    Ok(user)
}

/// Returns how kubectl finds this program: by its name if it is in `PATH`, else by its path.
fn program() -> Result<String, Failure> {
    let own = env::current_exe().map_err(|cause| FileError { verb: "find", path: "kasctl".into(), cause })?;
    let is_own = |path: &Path| fs::canonicalize(path).is_ok_and(|path| path == own);
    let search = env::var_os("PATH").unwrap_or_default();
    let first = env::split_paths(&search).map(|folder| folder.join("kasctl")).find(|path| path.is_file());
    if first.is_some_and(|path| is_own(&path)) {
        return Ok("kasctl".to_owned());
    }
    own.to_str()
        .map(str::to_owned)
        .ok_or(Failure::Usage("the path of kasctl is not UTF-8, as a kubeconfig is"))
}

#[cfg(test)]
mod tests {
    use rustls_pki_types::{CertificateDer, pem::PemObject as _};

    use super::*;

    #[test]
    fn a_private_key_beside_the_authorities_is_not_copied() {
        net::tls::install();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("server.pem");
        let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let certificate = own.cert.pem();
        fs::write(&path, format!("{}{certificate}{certificate}", own.signing_key.serialize_pem())).unwrap();
        let copied = STANDARD.decode(authorities(&path, None).unwrap()).unwrap();
        let text = String::from_utf8(copied).unwrap();
        assert!(!text.contains("PRIVATE KEY"), "{text}");
        let found: Vec<_> =
            CertificateDer::pem_slice_iter(text.as_bytes()).collect::<Result<_, _>>().unwrap();
        assert_eq!(found, [own.cert.der().clone(), own.cert.der().clone()]);
        // What has no certificate is refused as before.
        fs::write(&path, own.signing_key.serialize_pem()).unwrap();
        assert!(authorities(&path, None).is_err());
    }
}
