//! The chart of kas with the endpoint for kubectl.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::tools::{helm_one, render, yaml};

/// The namespace of the chart.
const NAMESPACE: &str = "kas";

#[tokio::test]
async fn client_certificates_need_files_of_their_own_and_no_users() -> Result<()> {
    let mut values = json!({
        "kubernetesApi": { "enabled": true, "clientCaConfigMap": "users-ca" },
        "tls": { "kubernetesApi": { "existingSecret": "tls" } },
        // The chart's own file wins, and the notes say so.
        "config": { "agent": { "kubernetes_api": { "listen": { "client_ca_file": "/other" } } } },
    });
    let rendered = async |values: &Value| {
        let answer = helm_one(render("kas", values, "kas", NAMESPACE)).await?;
        let objects = answer["objects"].as_array().context("objects")?;
        let config = objects.iter().find_map(|object| object["data"]["kas.yaml"].as_str());
        let config = yaml(config.context("a configuration")?).await?.remove(0);
        anyhow::Ok((config["agent"]["kubernetes_api"].clone(), answer))
    };
    let (section, answer) = rendered(&values).await?;
    assert_eq!(section["listen"]["client_ca_file"], "/etc/kas/client-ca/ca.crt");
    assert_eq!(section["listen"]["crl_file"], Value::Null);
    assert_eq!(section["users"]["file"], "");
    let notes = answer["notes"].as_str().context("notes")?;
    assert!(notes.contains("\n  agent.kubernetes_api.listen.client_ca_file"), "{notes}");
    let text = answer["objects"].to_string();
    assert!(!text.contains("kas-users") && !text.contains("client-crl"), "{text}");

    values["kubernetesApi"]["clientCrlConfigMap"] = "users-crl".into();
    values["kubernetesApi"]["users"] = json!([{ "name": "jane", "tokens": [] }]);
    let (section, answer) = rendered(&values).await?;
    assert_eq!(section["listen"]["crl_file"], "/etc/kas/client-crl/crl.pem");
    assert_eq!(section["users"]["file"], "/etc/kas/users/users.yaml");
    assert!(answer["objects"].to_string().contains("users-crl"));

    // Without these values, those of the configuration stay.
    let own = json!({
        "kubernetesApi": { "enabled": true },
        "tls": { "kubernetesApi": { "existingSecret": "tls" } },
        "config": { "agent": { "kubernetes_api": { "listen": { "client_ca_file": "/own" } } } },
    });
    assert_eq!(rendered(&own).await?.0["listen"]["client_ca_file"], "/own");
    Ok(())
}
