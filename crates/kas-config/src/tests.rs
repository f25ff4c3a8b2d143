mod complete;
mod kubernetes_api;
mod previous;
mod replicas;
mod secrets;
mod sections;
mod sinks;
mod values;

use std::{collections::HashMap, fs, os::unix::fs::PermissionsExt as _, path::PathBuf, time::Duration};

use super::*;

fn env() -> Environment {
    Environment { kas_state_dir: Some("/state".into()), ..Environment::default() }
}

fn defaults() -> Config {
    load("", &env()).unwrap().config
}

fn config(yaml: &str) -> Config {
    load(yaml, &env()).unwrap().config
}

fn problems(yaml: &str) -> Vec<String> {
    let problems = load(yaml, &env()).expect_err(yaml);
    problems.to_string().lines().map(str::to_owned).collect()
}

fn warnings(yaml: &str) -> Vec<String> {
    load(yaml, &env()).unwrap().warnings.iter().map(ToString::to_string).collect()
}

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A folder with files that only their owner may read.
struct Files(tempfile::TempDir, HashMap<&'static str, PathBuf>);

impl Files {
    fn new(files: &[(&'static str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let write = |(name, content): &(&'static str, &str)| {
            let path = folder.path().join(name);
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            (*name, path)
        };
        let paths = files.iter().map(write).collect();
        Self(folder, paths)
    }

    fn config(&self, api: &[&str], private: Option<&str>) -> Config {
        let mut config = defaults();
        config.api.secrets = if api.is_empty() {
            ApiSecrets::Made(self.0.path().join("state/api-secret"))
        } else {
            ApiSecrets::Given(api.iter().map(|name| self.path(name)).collect())
        };
        if let Some(name) = private {
            config.tracker = self.gossip(&format!("authentication_secret_file: {:?}", self.path(name)));
        }
        config
    }

    fn gossip(&self, keys: &str) -> Tracker {
        let yaml = format!(
            "private_api: {{listen: {{{}}}}}",
            keys.replace("DIR", &self.0.path().display().to_string())
        );
        config(&yaml).tracker
    }

    fn path(&self, name: &str) -> PathBuf {
        self.1.get(name).cloned().unwrap_or_else(|| self.0.path().join(name))
    }
}

const SECRET_A: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

const SECRET_B: &str = "BAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAhIiM=";
