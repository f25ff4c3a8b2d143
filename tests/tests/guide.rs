//! The commands of docs/guide.md and docs/security.md about kubectl, of docs/gitops.md, and of
//! docs/migration.md as far as they are of our programs, as they are on the page and in its order, with a
//! real API server, kas, agentk, kasctl, kubectl and Helm. Each block of these sections is run.
//!
//! What is not as for a reader:
//!
//! * `kas.example.com` is a name of a [proxy](Names), and the CA of its certificate is that of
//!   `SSL_CERT_FILE`.
//! * `/etc/kas/` and `/srv/` are folders of the test, in commands and in configurations.
//! * In configurations, the address to listen at, that of GitLab and those of issuers are of the test. So is
//!   the issuer of `kasctl login`, with a user that enters the code at once.
//! * `kas` without a configuration file listens on ports that may be in use, so it has one here, which says
//!   the
//!   same with others. The commands have that port, too.
//! * `cargo xtask bench watches`, in the section about Argo CD, takes minutes and is not run. Many open
//!   watches
//!   are in the test `many_watches`.
//! * agentk is installed by the chart, but there is no kubelet that runs it: the test does, with the account
//!   and the policy that the chart has created.
//! * There is no controller manager: the test puts into the roles `view`, `edit` and `admin` what they are
//!   made of.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    sync::Arc,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    certificates::{Certificates, UserAuthority},
    endpoint,
    gitlab::GitLab,
    issuer::{Issuer, SigningKey},
    kas::{Kas, eventually, merge},
    kubernetes::{Exclusive, Kubernetes, exclusive, helm, tools},
    names::Names,
    process::{SOON, program},
};
use tokio::{process::Command, time::timeout};

const GUIDE: &str = include_str!("../../docs/guide.md");
const SECURITY: &str = include_str!("../../docs/security.md");
const GITOPS: &str = include_str!("../../docs/gitops.md");
const MIGRATION: &str = include_str!("../../docs/migration.md");

/// Where the pages say that kas is.
const KAS: &str = "kas.example.com:8154";

/// A section of a page, without those below it.
fn section(page: &'static str, heading: &str) -> Result<&'static str> {
    let (_, rest) =
        page.split_once(&format!("# {heading}\n")).with_context(|| format!("no section {heading}"))?;
    // A comment in a block of code begins with one sign, if at all.
    Ok(rest.split("\n##").next().unwrap_or(rest))
}

/// Returns the blocks of code of a section in a language.
fn blocks(section: &str, language: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut lines = section.lines();
    while let Some(line) = lines.next() {
        let Some(name) = line.trim_start().strip_prefix("```") else { continue };
        let indent = line.len() - line.trim_start().len();
        let block = lines.by_ref().take_while(|line| line.trim() != "```");
        let block: Vec<&str> = block.map(|line| line.get(indent..).unwrap_or_default()).collect();
        if name == language {
            blocks.push(block.join("\n") + "\n");
        }
    }
    blocks
}

/// Returns the only block of a section in a language.
fn block(section: &str, language: &str) -> Result<String> {
    let found = blocks(section, language);
    let [block] =
        <[String; 1]>::try_from(found).map_err(|found| anyhow::anyhow!("{} blocks", found.len()))?;
    Ok(block)
}

/// Returns the commands of a block: a command may have several lines.
fn commands(block: &str) -> Vec<String> {
    let whole = block.replace("\\\n", " ");
    whole.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// Returns the commands of our programs in the text and in the blocks of a page, each once.
fn programs_in(page: &'static str) -> Vec<String> {
    let mut found = Vec::new();
    let in_blocks = blocks(page, "sh").into_iter().flat_map(|block| commands(&block));
    let text = page.split("```").step_by(2).collect::<String>();
    let in_text = text.split('`').skip(1).step_by(2).map(|span| span.replace('\n', " "));
    for command in in_blocks.chain(in_text) {
        let is_ours = ["kas ", "kasctl "].iter().any(|program| command.starts_with(program));
        if is_ours && !found.contains(&command) {
            found.push(command);
        }
    }
    found
}

/// Returns the commands of the job in a block.
fn script(block: &str) -> Result<Vec<String>> {
    script_of(block, "deploy")
}

/// Returns the commands of this job in a block.
fn script_of(block: &str, job: &str) -> Result<Vec<String>> {
    let jobs: Value = serde_saphyr::from_str(block)?;
    let lines = jobs[job]["script"].as_array().context("the job has a script")?;
    lines.iter().map(|line| Ok(line.as_str().context("a command is a text")?.to_owned())).collect()
}

/// Who runs a command: the kubeconfig that programs use.
#[derive(Clone, Copy, Debug)]
enum Reader {
    /// The owner of the cluster, directly.
    Owner,
    /// A user of kas, whose kubeconfig is empty at the beginning.
    User,
}

/// A machine for the commands of a page, and a cluster.
struct Stage {
    folder: tempfile::TempDir,
    proxy: Option<Names>,
    kubernetes: Arc<Kubernetes>,
    _exclusive: Exclusive,
}

impl Stage {
    /// Installs programs, and agentk in the cluster, which has a pod in the namespace `default`. `name` is
    /// that of agent 7.
    async fn start(name: &str, pod: &str) -> Result<Self> {
        let (tools, helm) = tokio::task::spawn_blocking(|| anyhow::Ok((tools()?, helm()?))).await??;
        let exclusive = exclusive().await?;
        let kubernetes = Arc::clone(&exclusive.kubernetes);
        let folder = tempfile::TempDir::with_prefix("guide-test-")?;
        for part in ["bin", "etc", "srv", "work"] {
            fs::create_dir(folder.path().join(part))?;
        }
        let stage = Self { folder, proxy: None, kubernetes, _exclusive: exclusive };
        symlink(&tools.kubectl, stage.at("bin/kubectl"))?;
        symlink(helm, stage.at("bin/helm"))?;
        for own in ["kas", "kasctl"] {
            let path = tokio::task::spawn_blocking(move || program(own)).await??;
            symlink(fs::canonicalize(path)?, stage.at("bin").join(own))?;
        }
        symlink(Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy"), stage.at("work/deploy"))?;
        Certificates::new(&stage.at("etc"), &["kas.example.com"])?;
        stage.kubernetes.create_pods("default", pod, 1).await?;
        stage.aggregate_roles().await?;

        // What is left of another section.
        let install = "
            helm uninstall agentk --namespace agentk --ignore-not-found
            helm install agentk deploy/charts/agentk --namespace agentk --create-namespace \
              --set kasAddress=grpcs://kas.example.com --set token.existingSecret=agent-token
            kasctl token agent --id 7 --name NAME --project 3 --agents-file /etc/kas/agents.yaml \
              --token-file /etc/kas/agent.token";
        stage.all(Reader::Owner, &commands(&install.replace("NAME", name)), &[]).await?;
        Ok(stage)
    }

    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    /// Copies the certificate and the key of kas to where a page has them.
    fn copy_certificate(&self, name: &str) -> Result<()> {
        fs::copy(self.at("etc/cert.pem"), self.at("etc").join(format!("{name}.crt")))?;
        fs::copy(self.at("etc/key.pem"), self.at("etc").join(format!("{name}.key")))?;
        Ok(())
    }

    /// What the controller manager does with roles that are made of others.
    async fn aggregate_roles(&self) -> Result<()> {
        let get = async |name: &str| -> Result<Value> {
            let role = self.kubernetes.kubectl(&["get", "clusterrole", name, "-o", "json"]).await?;
            Ok(serde_json::from_str(&role)?)
        };
        let mut rules = Vec::new();
        for name in ["view", "edit", "admin"] {
            let part = get(&format!("system:aggregate-to-{name}")).await?;
            rules.extend(part["rules"].as_array().context("the role has rules")?.clone());
            let patch = json!({ "rules": rules }).to_string();
            self.kubernetes.kubectl(&["patch", "clusterrole", name, "--type=merge", "-p", &patch]).await?;
        }
        Ok(())
    }

    /// Reads a configuration of a page, and changes it.
    fn config(&self, yaml: &str, over: Value) -> Result<Value> {
        let mut config: Value = serde_saphyr::from_str(&self.paths(yaml)?)?;
        merge(
            &mut config,
            json!({
                "identity": { "file": self.at("etc/agents.yaml") },
                "agent": { "kubernetes_api": { "listen": { "address": "127.0.0.1:0" } } },
            }),
        );
        merge(&mut config, over);
        Ok(config)
    }

    fn paths(&self, text: &str) -> Result<String> {
        let mut text = text.to_owned();
        for (page, own) in [("/etc/kas/", "etc"), ("/srv/", "srv")] {
            let own = self.at(own);
            text = text.replace(page, &format!("{}/", own.to_str().context("the path is UTF-8")?));
        }
        Ok(text)
    }

    /// Starts kas with a valid configuration. From now on, its name is known.
    async fn start_kas(&mut self, config: Value) -> Result<Kas> {
        let kas = Kas::start_with_config(config).await?;
        let address = endpoint::address(&kas).await?;
        self.proxy = Some(Names::start([(KAS, address), ("kas.example.com:443", address)]).await?);
        let file = kas.dir().join("kas.yaml");
        let check = format!("kas config check {}", file.display());
        self.all(Reader::Owner, &[check], &[]).await?;
        Ok(kas)
    }

    /// Starts agentk with the account that the chart has created, and with its policy, if there is one.
    async fn start_agentk(&self, kas: &Kas, token: &str) -> Result<Agentk> {
        let account = ["create", "token", "agentk", "--namespace", "agentk"];
        let account = self.kubernetes.kubectl(&account).await?;
        fs::write(self.at("etc/account"), account.trim())?;
        let map = ["get", "configmap", "agentk-policy", "--namespace", "agentk", "--ignore-not-found"];
        let map = [&map[..], &["-o", "jsonpath={.data.policy\\.yaml}"]].concat();
        let policy = self.kubernetes.kubectl(&map).await?;
        fs::write(self.at("etc/policy.yaml"), &policy)?;
        let mut flags = vec![
            ("--kube-token-file", self.at("etc/account")),
            ("--kube-ca-file", self.kubernetes.ca_file()),
        ];
        if !policy.is_empty() {
            flags.push(("--policy-file", self.at("etc/policy.yaml")));
        }
        let mut arguments = Vec::new();
        for (flag, path) in &flags {
            arguments.extend([*flag, path.to_str().context("the path is UTF-8")?]);
        }
        let server = self.kubernetes.server();
        let agentk = Agentk::start_with_arguments(kas.agent, token, &server, &arguments).await?;
        agentk.connected().await?;
        Ok(agentk)
    }

    /// Waits until the cluster allows something: a rule takes effect after a moment.
    async fn allows(&self, what: &[&str]) -> Result<()> {
        let ask = [&["auth", "can-i"], what].concat();
        eventually(&format!("that {what:?} is allowed"), async || Ok(self.kubernetes.kubectl(&ask).await))
            .await?;
        Ok(())
    }

    /// Waits until agentk may act as a group.
    async fn may_impersonate(&self, group: &str) -> Result<()> {
        let group = format!("groups/{group}");
        self.allows(&["impersonate", &group, "--as=system:serviceaccount:agentk:agentk"]).await
    }

    /// Runs a command in a shell, as it is.
    async fn run(&self, reader: Reader, command: &str, variables: &[(&str, &str)]) -> Result<Output> {
        let kubeconfig = match reader {
            Reader::Owner => self.kubernetes.admin_kubeconfig(),
            Reader::User => self.at("work/kubeconfig"),
        };
        let mut shell = Command::new("sh");
        shell
            .args(["-c", &self.paths(command)?])
            .current_dir(self.at("work"))
            .env_clear()
            .env("PATH", format!("{}:/usr/bin:/bin", self.at("bin").display()))
            .env("HOME", self.folder.path())
            .env("KUBECONFIG", kubeconfig)
            .env("SSL_CERT_FILE", self.at("etc/ca.pem"))
            .envs(self.proxy.as_ref().map(|names| ("HTTPS_PROXY", names.proxy())))
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        timeout(2 * SOON, shell.output()).await.with_context(|| format!("no end of {command}"))?.context("sh")
    }

    /// Runs commands one after the other. All must succeed, but those of which the page says that they are
    /// refused. Returns what they printed.
    async fn all(&self, reader: Reader, commands: &[String], variables: &[(&str, &str)]) -> Result<String> {
        let mut said = String::new();
        for command in commands {
            let output = self.run(reader, command, variables).await?;
            let err = String::from_utf8_lossy(&output.stderr);
            let is_refused = command.contains("# refused");
            ensure!(
                output.status.success() != is_refused,
                "{command}\n{}\n{}{err}",
                output.status,
                String::from_utf8_lossy(&output.stdout)
            );
            said.push_str(&String::from_utf8_lossy(&output.stdout));
            if is_refused {
                said.push_str(&err);
            }
        }
        Ok(said)
    }
}

/// What `kubectl get` of an object of the owner prints.
async fn config_map(stage: &Stage, name: &str) -> Result<String> {
    stage.kubernetes.kubectl(&["get", "configmap", name, "-o", "jsonpath={.data.made-by}"]).await
}

/// What jobs deploy.
fn write_app(stage: &Stage, name: &str) -> Result<()> {
    let app = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": name },
        "data": { "made-by": name },
    });
    Ok(fs::write(stage.at("work/app.yaml"), app.to_string())?)
}

#[tokio::test]
async fn kubectl_through_kas_and_a_policy_of_the_cluster() -> Result<()> {
    let mut stage = Stage::start("prod", "plain").await?;
    let page = section(GUIDE, "kubectl through kas")?;
    stage.copy_certificate("tls")?;
    fs::copy(stage.at("etc/ca.pem"), stage.at("work/ca.pem"))?;
    let commands_of: Vec<_> = blocks(page, "sh").iter().map(|block| commands(block)).collect();
    ensure!(commands_of.len() == 3, "{commands_of:?}");
    stage.all(Reader::Owner, &commands_of[0], &[]).await?;
    let config = stage.config(&block(page, "yaml")?, json!({}))?;
    let kas = stage.start_kas(config).await?;
    let token = fs::read_to_string(stage.at("etc/agent.token"))?;
    let agentk = stage.start_agentk(&kas, &token).await?;
    stage.allows(&["list", "pods", "--as=system:serviceaccount:agentk:agentk"]).await?;
    let said = stage.all(Reader::User, &commands_of[1..].concat(), &[]).await?;
    ensure!(said.contains("plain-00000"), "{said}");

    // The policy of the other page, for the same context.
    let page = section(SECURITY, "Policy of a cluster")?;
    let policy = block(page, "text")?;
    let indented: String = policy.lines().map(|line| format!("  {line}\n")).collect();
    fs::write(stage.at("work/policy.yaml"), format!("policy:\n{indented}"))?;
    stage.kubernetes.create_pods("shop", "cart", 1).await?;
    stage.kubernetes.create_pods("blog", "post", 1).await?;
    let (install, try_it): (Vec<_>, Vec<_>) =
        commands(&block(page, "sh")?).into_iter().partition(|command| command.starts_with("helm"));
    ensure!((install.len(), try_it.len()) == (1, 2), "{install:?}, {try_it:?}");
    stage.all(Reader::User, &["kubectl --context prod get pods --namespace blog".to_owned()], &[]).await?;
    stage.all(Reader::Owner, &install, &[]).await?;
    drop(agentk);
    let _agentk = stage.start_agentk(&kas, &token).await?;
    let said = stage.all(Reader::User, &try_it, &[]).await?;
    ensure!(said.contains("cart-00000") && said.contains("policy") && !said.contains("post-00000"), "{said}");
    ensure!(
        blocks(SECURITY, "sh").len() == 1 && blocks(SECURITY, "console").is_empty(),
        "a block is not run"
    );
    Ok(())
}

/// Returns the commands of a block of a terminal, and what it shows of their output.
fn terminal(block: &str) -> (Vec<String>, Vec<String>) {
    let (commands, output): (Vec<_>, Vec<_>) =
        block.lines().map(str::to_owned).partition(|line| line.starts_with("$ "));
    (commands.into_iter().map(|line| line[2..].to_owned()).collect(), output)
}

/// The sections below that about kubectl, and the one about many watches: each way to be a user of kas.
#[tokio::test]
async fn certificates_logins_one_machine_and_many_watches() -> Result<()> {
    let mut stage = Stage::start("prod", "ways").await?;
    stage.copy_certificate("tls")?;
    let token = fs::read_to_string(stage.at("etc/agent.token"))?;
    let get_pods = ["kubectl --context prod get pods".to_owned()];

    // Client certificates: the page has a configuration, and names the keys of the kubeconfig.
    let page = section(GUIDE, "Client certificates")?;
    ensure!(blocks(page, "sh").is_empty() && blocks(page, "console").is_empty(), "a block is not run");
    let authority = UserAuthority::new(&stage.at("etc"))?;
    let (certificate, key) = authority.user("jane", Some("dev"), 7)?;
    let config = stage.config(&block(page, "yaml")?, json!({}))?;
    let kas = stage.start_kas(config).await?;
    let rights = "
        helm upgrade agentk deploy/charts/agentk --namespace agentk --reuse-values \
          --set impersonation.enabled=true --set 'impersonation.users={*}' --set 'impersonation.groups={kas:dev}'
        kubectl delete clusterrolebinding kas-dev --ignore-not-found
        kubectl create clusterrolebinding kas-dev --clusterrole=view --group=kas:dev";
    stage.all(Reader::Owner, &commands(rights), &[]).await?;
    let agentk = stage.start_agentk(&kas, &token).await?;
    stage.may_impersonate("kas:dev").await?;
    stage.allows(&["list", "pods", "--as=x", "--as-group=kas:dev"]).await?;
    let kubeconfig = format!(
        "kubectl config set-cluster prod --server=https://{KAS}/agents/7
        kubectl config set-credentials jane --client-certificate={} --client-key={}
        kubectl config set-context prod --cluster=prod --user=jane",
        certificate.display(),
        key.display()
    );
    stage.all(Reader::User, &commands(&kubeconfig), &[]).await?;
    let said = stage.all(Reader::User, &get_pods, &[]).await?;
    ensure!(said.contains("ways-00000"), "{said}");
    drop((agentk, kas));

    // A login. kas has the issuer and the client id, as the page demands.
    let page = section(GUIDE, "Log in with a browser")?;
    ensure!(blocks(page, "sh").is_empty(), "a block is not run");
    let (issuer, key) = (Issuer::start().await?, SigningKey::ec("login")?);
    issuer.publish([&key]);
    issuer.let_log_in(key.token(&issuer.claims("1234", json!({ "sub": "42" }))));
    let authorities = fs::read_to_string(stage.at("etc/ca.pem"))? + &fs::read_to_string(issuer.ca_file())?;
    fs::write(stage.at("etc/ca.pem"), authorities)?;
    let listen = json!({ "certificate_file": stage.at("etc/tls.crt"), "key_file": stage.at("etc/tls.key") });
    let accepted = json!({
        "issuer": issuer.url(), "audiences": ["1234"], "username": "gl:{sub}", "ca_file": issuer.ca_file(),
    });
    let access = json!([{ "agents": "all", "users": ["gl:42"], "as": "agent" }]);
    let over = json!({ "agent": { "kubernetes_api": {
        "listen": listen, "oidc": [accepted], "access": access,
    } } });
    let config = stage.config("{}", over)?;
    let kas = stage.start_kas(config).await?;
    let agentk = stage.start_agentk(&kas, &token).await?;
    fs::remove_file(stage.at("work/kubeconfig"))?;
    let (typed, shown) =
        terminal(&block(page, "console")?.replace("https://gitlab.example.com", issuer.url()));
    ensure!((typed.len(), shown.len()) == (3, 2), "{typed:?}, {shown:?}");
    let mut said = String::new();
    for command in &typed {
        let output = stage.run(Reader::User, command, &[]).await?;
        ensure!(output.status.success(), "{command}\n{output:?}");
        said += &String::from_utf8_lossy(&output.stderr);
        said += &String::from_utf8_lossy(&output.stdout);
    }
    for line in &shown {
        ensure!(said.lines().any(|said| said == line), "{line:?} is not in {said}");
    }
    ensure!(said.contains("ways-00000"), "{said}");
    drop((agentk, kas));

    // One machine.
    let page = section(GUIDE, "On one machine, without a configuration file")?;
    let script = block(page, "sh")?;
    let state = stage.at(".local/state/kas");
    fs::create_dir_all(&state)?;
    let users = state.join("users.yaml");
    // kas makes it so where it has no configuration file.
    testkit::kas::write_private(&users, "users: []\n")?;
    let kas = Kas::start_with_config(json!({
        "state_dir": state,
        "identity": { "file": stage.at("etc/agents.yaml") },
        "agent": { "kubernetes_api": {
            "listen": { "address": "127.0.0.1:0" },
            "users": { "file": users },
            "access": [{ "agents": "all", "users": ["kas:*"], "as": "agent" }],
        } },
    }))
    .await?;
    let agentk = stage.start_agentk(&kas, &token).await?;
    let address = endpoint::address(&kas).await?.to_string();
    ensure!(script.contains("127.0.0.1:8154"), "{script}");
    fs::remove_file(stage.at("work/kubeconfig"))?;
    // One shell, because a command uses a variable of another one.
    let script = format!("set -e\n{}", script.replace("127.0.0.1:8154", &address));
    let said = stage.all(Reader::User, &[script, get_pods[0].clone()], &[]).await?;
    ensure!(said.contains("ways-00000"), "{said}");
    drop((agentk, kas));

    // Many watches: both configurations.
    let page = section(GUIDE, "Many watches: Argo CD")?;
    ensure!(blocks(page, "sh").is_empty() && blocks(page, "console").is_empty(), "a block is not run");
    let yaml = blocks(page, "yaml");
    let [of_kas, of_chart] = &yaml[..] else { anyhow::bail!("{yaml:?}") };
    let over = json!({ "agent": { "kubernetes_api": { "listen": listen, "users": { "file": users } } } });
    let config = stage.config(of_kas, over)?;
    let kas = stage.start_kas(config).await?;
    fs::write(stage.at("work/values.yaml"), of_chart)?;
    let upgrade =
        "helm upgrade agentk deploy/charts/agentk --namespace agentk --reuse-values --values values.yaml
        kubectl get deployment agentk --namespace agentk -o jsonpath={..args}";
    let said = stage.all(Reader::Owner, &commands(upgrade), &[]).await?;
    ensure!(said.contains("\"--max-tunnels=2000\"") || said.contains("--max-tunnels 2000"), "{said}");
    let _agentk = stage.start_agentk(&kas, &token).await?;
    Ok(())
}

#[tokio::test]
async fn kubectl_for_a_team_without_gitlab() -> Result<()> {
    let mut stage = Stage::start("prod-1", "team").await?;
    let page = section(GUIDE, "kubectl for a team, without GitLab, in ten minutes")?;
    stage.copy_certificate("kubernetes")?;
    let (dex, gitlab) = (Issuer::start().await?, Issuer::start().await?);
    let (dex_key, gitlab_key) = (SigningKey::ec("dex")?, SigningKey::ec("gitlab")?);
    dex.publish([&dex_key]);
    gitlab.publish([&gitlab_key]);
    let mut config = stage.config(&block(page, "yaml")?, json!({}))?;
    let oidc = config["agent"]["kubernetes_api"]["oidc"].as_array_mut().context("a list of issuers")?;
    for (section, issuer) in oidc.iter_mut().zip([&dex, &gitlab]) {
        merge(section, json!({ "issuer": issuer.url(), "ca_file": issuer.ca_file() }));
    }
    let kas = stage.start_kas(config).await?;
    let commands_of: Vec<_> = blocks(page, "sh").iter().map(|block| commands(block)).collect();
    let [in_cluster, by_hand] = &commands_of[..] else { anyhow::bail!("{commands_of:?}") };
    stage.all(Reader::Owner, in_cluster, &[]).await?;
    let token = fs::read_to_string(stage.at("etc/agent.token"))?;
    let _agentk = stage.start_agentk(&kas, &token).await?;
    for group in ["corp:sre", "corp:dev", "ci"] {
        stage.may_impersonate(group).await?;
    }
    stage.allows(&["list", "pods", "--as=x", "--as-group=corp:sre"]).await?;
    stage.allows(&["create", "configmaps", "--as=x", "--as-group=ci"]).await?;

    let member = |group: &str| {
        let claims = json!({ "email": "jane@example.com", "email_verified": true, "groups": [group] });
        dex_key.token(&dex.claims("kubernetes", claims))
    };
    let said = stage.all(Reader::User, by_hand, &[("ID_TOKEN", &member("sre"))]).await?;
    ensure!(said.contains("team-00000"), "{said}");
    // The rule of developers is for other agents.
    let (get, set) = by_hand.split_last().context("there are commands")?;
    stage.all(Reader::User, set, &[("ID_TOKEN", &member("dev"))]).await?;
    let refused = stage.run(Reader::User, get, &[]).await?;
    let reason = String::from_utf8_lossy(&refused.stderr);
    ensure!(!refused.status.success() && reason.contains("gives no access to this agent"), "{refused:?}");

    write_app(&stage, "oidc-job")?;
    let job = json!({
        "sub": "project_path:acme/web:ref_type:branch:ref:main",
        "namespace_path": "acme",
        "project_path": "acme/web",
        "ref": "main",
        "ref_protected": "true",
    });
    let job = gitlab_key.token(&gitlab.claims("https://kas.example.com", job));
    let _ = fs::remove_file(stage.at("work/kubeconfig"));
    stage.all(Reader::User, &script(&block(page, "text")?)?, &[("KUBE_TOKEN", &job)]).await?;
    ensure!(config_map(&stage, "oidc-job").await? == "oidc-job");
    Ok(())
}

#[tokio::test]
async fn ci_jobs_and_users_of_gitlab() -> Result<()> {
    let mut stage = Stage::start("prod", "gitlab").await?;
    let page = section(GUIDE, "CI jobs and users of GitLab")?;
    stage.copy_certificate("kubernetes")?;
    let gitlab = GitLab::start().await?;
    fs::copy(gitlab.secret_file(), stage.at("etc/gitlab-secret"))?;
    let token = testkit::kas::token(7);
    gitlab.know(&token, 7, "prod", 3);
    gitlab.have_job(
        "job-token",
        json!({
            "allowed_agents": [{
                "id": 7,
                "config_project": { "id": 3 },
                "configuration": { "access_as": { "ci_job": {} } },
            }],
            "job": { "id": 302 },
            "pipeline": { "id": 574 },
            "project": { "id": 20, "groups": [{ "id": 23 }] },
            "user": { "id": 5, "username": "jane" },
        }),
    );
    gitlab.have_user(
        "glpat-jane",
        json!({
            "agent": { "id": 7, "config_project": { "id": 3 } },
            "user": { "id": 5, "username": "jane" },
            "access_as": { "user": { "projects": [{ "id": 20, "roles": ["guest", "reporter", "developer"] }] } },
        }),
    );
    let yaml = block(page, "yaml")?;
    let config = stage.config(&yaml, json!({ "identity": null, "gitlab": { "address": gitlab.url() } }))?;
    let kas = stage.start_kas(config).await?;
    let commands_of: Vec<_> = blocks(page, "sh").iter().map(|block| commands(block)).collect();
    let [by_kasctl, by_user, in_cluster] = &commands_of[..] else { anyhow::bail!("{commands_of:?}") };
    stage.all(Reader::Owner, in_cluster, &[]).await?;
    let _agentk = stage.start_agentk(&kas, &token).await?;
    for group in ["gitlab:ci_job", "gitlab:group:23", "gitlab:project:20", "gitlab:project_role:20:developer"]
    {
        stage.may_impersonate(group).await?;
    }
    stage.allows(&["create", "configmaps", "--as=x", "--as-group=gitlab:project:20"]).await?;
    stage.allows(&["list", "pods", "--as=x", "--as-group=gitlab:project_role:20:developer"]).await?;

    let variables = [("CI_JOB_TOKEN", "job-token")];
    for (name, commands) in [("job", script(&block(page, "text")?)?), ("job-kasctl", by_kasctl.clone())] {
        write_app(&stage, name)?;
        let _ = fs::remove_file(stage.at("work/kubeconfig"));
        stage.all(Reader::User, &commands, &variables).await?;
        ensure!(config_map(&stage, name).await? == name);
    }
    let kubeconfig = fs::read_to_string(stage.at("work/kubeconfig"))?;
    ensure!(!kubeconfig.contains("job-token"), "{kubeconfig}");

    fs::write(stage.at("work/pat.token"), "glpat-jane")?;
    fs::remove_file(stage.at("work/kubeconfig"))?;
    let said = stage.all(Reader::User, by_user, &[]).await?;
    ensure!(said.contains("gitlab-00000"), "{said}");
    let output = stage.run(Reader::User, "kubectl delete pod gitlab-00000", &[]).await?;
    let reason = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success() && reason.contains("gitlab:user:jane"), "{output:?}");
    Ok(())
}

/// Answers one request with 201, and returns it.
async fn one_request(listener: tokio::net::TcpListener) -> Result<String> {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let (mut stream, _) = listener.accept().await?;
    let mut read = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&read).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
            if body.len() >= length.unwrap_or(0) {
                break;
            }
        }
        ensure!(stream.read_buf(&mut read).await? > 0, "the request is not complete");
    }
    stream.write_all(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").await?;
    Ok(String::from_utf8(read)?)
}

#[tokio::test]
async fn from_git_to_the_cluster() -> Result<()> {
    let mut stage = Stage::start("prod", "manifests").await?;
    stage.copy_certificate("kubernetes")?;
    let gitlab = GitLab::start().await?;
    fs::copy(gitlab.secret_file(), stage.at("etc/gitlab-secret"))?;
    let token = testkit::kas::token(7);
    gitlab.know(&token, 7, "prod", 3);
    gitlab.have_job(
        "job-token",
        json!({
            "allowed_agents": [{ "id": 7, "config_project": { "id": 3 }, "configuration": {} }],
            "job": { "id": 302 },
            "pipeline": { "id": 574 },
            "project": { "id": 20, "groups": [] },
            "user": { "id": 5, "username": "jane" },
        }),
    );
    let page = section(GITOPS, "Set it up")?;
    let yaml = blocks(page, "yaml");
    let [of_kas, of_agent] = &yaml[..] else { anyhow::bail!("{yaml:?}") };
    let folder = stage.at("etc/agents-config/agents/prod");
    fs::create_dir_all(&folder)?;
    // Nothing collects garbage here, so a deletion in the foreground would not end.
    let entry = of_agent.trim_end().to_owned() + "\n    prune_propagation_policy: background\n";
    fs::write(folder.join("config.yaml"), entry)?;
    let kas_yaml = block(section(GITOPS, "Namespaces and service accounts")?, "yaml")?;
    let kas_yaml: Value = serde_saphyr::from_str(&kas_yaml)?;
    let environments = json!({ "environments": kas_yaml["environments"] });
    fs::write(folder.join("kas.yaml"), environments.to_string())?;
    let endpoint = json!({
        "identity": null,
        "gitlab": { "address": gitlab.url(), "authentication_secret_file": stage.at("etc/gitlab-secret") },
        "agent": { "kubernetes_api": { "listen": {
            "certificate_file": stage.at("etc/kubernetes.crt"), "key_file": stage.at("etc/kubernetes.key"),
        } } },
    });
    let config = stage.config(of_kas, endpoint)?;
    let kas = stage.start_kas(config).await?;
    let _agentk = {
        // What kas applies, agentk must be allowed to.
        let admin = "kubectl create clusterrolebinding agentk-manifests --clusterrole=cluster-admin \
                     --serviceaccount=agentk:agentk";
        let before = "kubectl delete clusterrolebinding agentk-manifests --ignore-not-found";
        stage.all(Reader::Owner, &[before.to_owned(), admin.to_owned()], &[]).await?;
        stage.start_agentk(&kas, &token).await?
    };
    let (address, secret) = (format!("grpc://{}", kas.api), kas.dir().join("secret-0"));
    let variables = [
        ("KASCTL_ADDRESS", address.as_str()),
        ("KASCTL_SECRET_FILE", secret.to_str().context("the path is UTF-8")?),
        ("GIT_AUTHOR_NAME", "T"),
        ("GIT_AUTHOR_EMAIL", "t@example.com"),
        ("GIT_COMMITTER_NAME", "T"),
        ("GIT_COMMITTER_EMAIL", "t@example.com"),
        ("CI_JOB_TOKEN", "job-token"),
    ];
    let colour = async || {
        let get = ["get", "configmap", "hello", "--ignore-not-found", "-o", "jsonpath={.data.colour}"];
        stage.kubernetes.kubectl(&get).await
    };
    let is = async |wanted: &str| {
        eventually(&format!("that hello is {wanted:?}"), async || {
            let found = colour().await?;
            Ok(if found == wanted { Ok(()) } else { Err(found) })
        })
        .await
    };
    let synced = async || {
        let look = ["kasctl gitops 7 group/manifests".to_owned()];
        eventually("that the project is synced", async || {
            let said = stage.all(Reader::Owner, &look, &variables).await?;
            Ok(if said.contains("synced") { Ok(said) } else { Err(said) })
        })
        .await
    };

    // A commit, and a look at it.
    let commands_of: Vec<_> = blocks(page, "sh").iter().map(|block| commands(block)).collect();
    let [create, look] = &commands_of[..] else { anyhow::bail!("{commands_of:?}") };
    stage.all(Reader::Owner, create, &variables).await?;
    is("green").await?;
    synced().await?;
    let said = stage.all(Reader::Owner, look, &variables).await?;
    ensure!(said.contains("ConfigMap default/hello"), "{said}");

    // A diff of a branch and of files; a look at the cluster; a sync.
    let diffs = commands(&block(section(GITOPS, "Commands")?, "sh")?);
    let said = stage.all(Reader::Owner, &diffs, &variables).await?;
    ensure!(said.matches("+  colour: blue").count() == 2, "{said}");
    ensure!(colour().await? == "green", "a diff wrote something");

    // The job of a merge request, with its own rights.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let api = format!("http://{}/api/v4", listener.local_addr()?);
    let posted = tokio::spawn(one_request(listener));
    let job = [
        &variables[2..],
        &[
            ("PREVIEW_TOKEN", "glpat-preview"),
            ("CI_API_V4_URL", &api),
            ("CI_PROJECT_ID", "20"),
            ("CI_MERGE_REQUEST_IID", "5"),
        ],
    ]
    .concat();
    let script = script_of(&block(section(GITOPS, "In a merge request")?, "text")?, "preview")?;
    stage.all(Reader::User, &script, &job).await?;
    let posted = timeout(SOON, posted).await???;
    ensure!(posted.starts_with("POST /api/v4/projects/20/merge_requests/5/notes "), "{posted}");
    ensure!(posted.contains("glpat-preview") && posted.contains("colour%3A+blue"), "{posted}");

    // The environments of the agent.
    let look = commands(&block(section(GITOPS, "Namespaces and service accounts")?, "sh")?);
    let said = stage.all(Reader::Owner, &look, &variables).await?;
    ensure!(said.matches("review/*").count() == 2 && said.matches("production").count() == 1, "{said}");

    // The other page, about this kas: what it says in its text, and its block.
    fs::copy(kas.dir().join("kas.yaml"), stage.at("work/kas.yaml"))?;
    let migration = programs_in(MIGRATION);
    ensure!(migration.len() >= 7, "{migration:?}");
    // What GitLab answers to `kas gitlab check` is the matter of the tests in gitlab.rs.
    for command in migration.iter().filter(|command| !command.starts_with("kas gitlab check")) {
        let command = command.replace("AGENT", "7");
        let command = match command.as_str() {
            // The text has named the file before.
            "kas config check" => format!("{command} kas.yaml"),
            _ => command,
        };
        let said = stage.run(Reader::Owner, &command, &variables).await?;
        // A diff says by its code whether there are changes.
        let is_diff = command.starts_with("kasctl diff");
        let is_good = said.status.success() || (is_diff && said.status.code() == Some(1));
        ensure!(is_good, "{command}: {}", String::from_utf8_lossy(&said.stderr));
    }

    // The end.
    fs::write(folder.join("config.new"), "")?;
    fs::rename(folder.join("config.new"), folder.join("config.yaml"))?;
    let destroy = commands(&block(section(GITOPS, "Remove it")?, "sh")?);
    eventually("that the project is removed", async || {
        Ok(stage.all(Reader::Owner, &destroy, &variables).await.map_err(|error| format!("{error:#}")))
    })
    .await?;
    is("").await?;
    ensure!(blocks(GITOPS, "sh").len() == 5 && blocks(GITOPS, "console").len() == 1, "a block is not run");
    Ok(())
}

#[test]
fn blocks_and_commands_of_a_page_are_found() {
    let page = "# A\n\n## B\n\n1. x\n\n   ```sh\n   one \\\n     two\n   three\n   ```\n\n```text\n# no\n```\n\n## C\n\n```sh\nfour\n```\n";
    let (_, b) = page.split_once("# B\n").expect("a section");
    assert_eq!(blocks(b, "sh").len(), 2);
    let first: BTreeMap<_, _> = commands(&blocks(b, "sh")[0]).into_iter().enumerate().collect();
    assert_eq!(first[&0], "one    two");
    assert_eq!(first[&1], "three");
    assert_eq!(blocks(b, "text"), ["# no\n"]);
    let (typed, shown) = terminal("$ one\ntwo\n$ three\n");
    assert_eq!((typed, shown), (vec!["one".to_owned(), "three".to_owned()], vec!["two".to_owned()]));
    let page = "Run `kas check` or `kas\ncheck`, not `kas.yaml`.\n\n```sh\nkasctl agents\nflux x\n```\n";
    assert_eq!(programs_in(page), ["kasctl agents", "kas check"]);
}
