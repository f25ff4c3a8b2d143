//! A repository of manifests, a real API server, and the real agentk in front of it: what planners work on.
//!
//! All of it is on the bridge: agentk reaches the replicas from there, and the API server listens on
//! loopback.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use history::Planned;
use rand::{RngExt as _, rngs::StdRng};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    kas::token,
    kubernetes::{
        Kubernetes, Reader,
        applies::{Applies, COMMIT},
    },
    manifests::Repository,
    mesh::Mesh,
};

/// What the configuration of the agent says about the project.
const ENTRY: &str = "    default_namespace: default\n";
/// Drift is looked for each 5 s, and not each 5 min: an object that a replaced planner has put back is then
/// put right within a run.
const KAS_YAML: &str = "gitops:\n  check: 5s\n";
/// Names that objects of commits may have. A commit has more than half of them, and any of them may come and
/// go with it.
const NAMES: usize = 60;
/// How many in ten of the names a commit has.
const PRESENT: u32 = 6;
/// The objects of all commits.
const OBJECTS: &str = "/api/v1/namespaces/default/configmaps";
/// How an inventory is marked.
const INVENTORY: &str = "cli-utils.sigs.k8s.io/inventory-id";
/// How what an inventory has is marked.
const OWNER: &str = "config.k8s.io/owning-inventory";

/// All of it. Dropping it ends the processes.
pub(crate) struct Manifests {
    // Ends before what it serves.
    agentk: Option<Agentk>,
    reader: Reader,
    kubernetes: Kubernetes,
    repository: Repository,
    agent: i64,
    /// The objects of the last commit, and their values.
    wanted: BTreeMap<String, String>,
}

/// What planners did.
pub(crate) struct Judged {
    /// For the history.
    pub(crate) planned: Vec<Planned>,
    pub(crate) deleted: usize,
    pub(crate) applies: Applies,
}

impl Manifests {
    /// Starts the API server, and tells the replicas of the repository of this agent.
    pub(crate) async fn start(mesh: &mut Mesh, agent: i64) -> Result<Self> {
        let repository = Repository::of_agent(agent, ENTRY, KAS_YAML).await?;
        mesh.add_config(repository.kas_config());
        let kubernetes = Kubernetes::start_audited_in(mesh.network().outside()).await?;
        let reader = kubernetes.reader().await?;
        Ok(Self { agentk: None, reader, kubernetes, repository, agent, wanted: BTreeMap::new() })
    }

    pub(crate) fn agent(&self) -> i64 {
        self.agent
    }

    /// Starts the agentk, which knows these replicas.
    pub(crate) async fn connect(&mut self, mesh: &Mesh, replicas: &[usize]) -> Result<()> {
        let urls: Vec<String> = replicas.iter().map(|n| format!("grpc://{}", mesh.agents(*n))).collect();
        let kubeconfig = self.kubernetes.admin_kubeconfig();
        let cluster = ["--kubeconfig", kubeconfig.to_str().context("a path in UTF-8")?];
        let outside = mesh.network().outside();
        let agentk = Agentk::start_at_urls_in(outside, &urls.join(","), &token(self.agent), &cluster).await?;
        agentk.connected().await?;
        self.agentk = Some(agentk);
        Ok(())
    }

    /// Pushes a commit that adds some objects, changes all others, and removes some. Returns its number.
    pub(crate) async fn commit(&mut self, rng: &mut StdRng) -> Result<usize> {
        let number = self.repository.commits();
        let mut files = Vec::new();
        self.wanted.clear();
        for n in 0..NAMES {
            // A set without objects is refused.
            if n > 0 && !rng.random_ratio(PRESENT, 10) {
                continue;
            }
            let (name, value) = (format!("object-{n:02}"), number.to_string());
            let object = json!({
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": { "name": name, "annotations": { COMMIT: value } },
                "data": { "v": value },
            });
            files.push(object.to_string());
            self.wanted.insert(name, value);
        }
        self.repository.push(&[("objects.yaml", files.join("\n---\n"))]).await?;
        Ok(number)
    }

    /// Compares the objects in the cluster that a planner has marked with those of the last commit. Returns
    /// the first difference; `None`: they are equal.
    pub(crate) async fn difference(&self) -> Result<Option<String>> {
        let list = self.reader.get(OBJECTS).await?;
        Ok(difference(&list, &self.wanted))
    }

    /// Judges everything that planners have written until now.
    pub(crate) fn judged(&self) -> Result<Judged> {
        let id = Repository::inventory(self.agent);
        let deletions = self.repository.deletions(&self.kubernetes, &id)?;
        let applies = self.repository.applies(&self.kubernetes, &id)?;
        let planned = |rule: &str, checked: usize, wrong: &[String]| Planned {
            rule: rule.to_owned(),
            checked: checked as u64,
            wrong: wrong.to_vec(),
        };
        let planned = vec![
            planned("deletions", deletions.deleted, &deletions.violations),
            planned("applies", applies.applied, &applies.violations),
        ];
        Ok(Judged { planned, deleted: deletions.deleted, applies })
    }
}

fn difference(list: &Value, wanted: &BTreeMap<String, String>) -> Option<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let items = list["items"].as_array().map(Vec::as_slice).unwrap_or_default();
    let marked = items.iter().filter(|item| {
        let metadata = &item["metadata"];
        metadata["annotations"][OWNER].is_string() && metadata["labels"][INVENTORY].is_null()
    });
    let there: BTreeMap<String, String> =
        marked.map(|item| (text(&item["metadata"]["name"]), text(&item["data"]["v"]))).collect();
    let lacks = wanted.iter().find(|(name, value)| there.get(*name) != Some(*value));
    if let Some((name, value)) = lacks {
        return Some(format!("{name} is {:?} and not {value}", there.get(name)));
    }
    let more = there.iter().find(|(name, _)| !wanted.contains_key(*name));
    more.map(|(name, value)| format!("{name} with {value} is there"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_from_the_last_commit_is_told() {
        let object = |name: &str, value: &str| json!({ "metadata": { "name": name, "annotations": { OWNER: "1-42" } }, "data": { "v": value } });
        let inventory = json!({ "metadata": {
            "name": "inventory-1-42", "labels": { INVENTORY: "1-42" }, "annotations": { OWNER: "x" },
        } });
        let foreign = json!({ "metadata": { "name": "kube-root-ca.crt" }, "data": { "v": "3" } });
        let wanted = |names: &[&str]| -> BTreeMap<String, String> {
            names.iter().map(|name| ((*name).to_owned(), "3".to_owned())).collect()
        };
        let list = json!({ "items": [object("a", "3"), object("b", "3"), inventory, foreign] });
        assert_eq!(difference(&list, &wanted(&["a", "b"])), None);
        assert!(difference(&list, &wanted(&["a"])).is_some_and(|why| why.contains("b with 3")));
        assert!(difference(&list, &wanted(&["a", "b", "c"])).is_some_and(|why| why.contains("c is None")));
        let old = json!({ "items": [object("a", "2")] });
        assert!(difference(&old, &wanted(&["a"])).is_some_and(|why| why.contains("Some(\"2\")")));
    }
}
