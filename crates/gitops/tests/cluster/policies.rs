//! cli-utils' cases of inventory policies: who may take over which object.

use anyhow::{Context as _, Result};
use gitops::{Action, InventoryPolicy, Outcome};
use http::Method;

use crate::{
    cases::{Case, about, deployment, with_policy},
    wire::set,
};

const NAME: &str = "nginx-deployment";

impl Case {
    async fn replicas(&self) -> Result<i64> {
        let live = self.object("deployments", NAME).await?.context("a deployment")?;
        live["spec"]["replicas"].as_i64().context("a number")
    }
}

#[tokio::test]
async fn must_match() -> Result<()> {
    let it = Case::new(70, "must-match").await?;
    it.applied(&[&deployment(4)]).await?;
    let second = with_policy(&it.project, 71, InventoryPolicy::MustMatch);
    let report = it.apply_set(&second, &set("c", &deployment(6))).await;
    assert_eq!(report.outcome, Outcome::Incomplete, "{report:#?}");
    let failed = about(&report, NAME);
    assert!(failed.action == Action::Failed && failed.message.contains("70-1"), "{failed:?}");
    assert_eq!((it.replicas().await?, it.owner("deployments", NAME).await?), (4, Some("70-1".to_owned())));
    assert!(it.wire.inventory(it.namespace, "71-1").await?.is_some(), "both have an inventory");
    Ok(())
}

#[tokio::test]
async fn adopt_if_no_inventory() -> Result<()> {
    let it = Case::new(72, "adopt-unmanaged").await?;
    let unmanaged = &set("c", &deployment(4)).objects()[0].body.clone();
    let collection = "/apis/apps/v1/namespaces/adopt-unmanaged/deployments";
    it.wire.send(Method::POST, collection, unmanaged).await?;
    let report = it.apply(&[&deployment(6)]).await;
    assert_eq!(about(&report, NAME).action, Action::Failed, "{report:#?}");
    let project = with_policy(&it.project, 72, InventoryPolicy::AdoptIfNoInventory);
    let report = it.apply_set(&project, &set("c", &deployment(6))).await;
    assert_eq!(report.outcome, Outcome::Synced, "{report:#?}");
    assert_eq!(about(&report, NAME).action, Action::Changed);
    assert_eq!((it.replicas().await?, it.owner("deployments", NAME).await?), (6, Some("72-1".to_owned())));
    assert_eq!(it.inventory().await?, Some(1));
    Ok(())
}

#[tokio::test]
async fn adopt_all() -> Result<()> {
    let it = Case::new(73, "adopt-all").await?;
    it.applied(&[&deployment(4)]).await?;
    let second = with_policy(&it.project, 74, InventoryPolicy::AdoptAll);
    let report = it.apply_set(&second, &set("c", &deployment(6))).await;
    assert_eq!(report.outcome, Outcome::Synced, "{report:#?}");
    assert_eq!((it.replicas().await?, it.owner("deployments", NAME).await?), (6, Some("74-1".to_owned())));
    assert_eq!(it.wire.inventory(it.namespace, "74-1").await?.map(|keys| keys.len()), Some(1));
    // The first one still lists it, but may not delete it any more.
    assert_eq!(it.inventory().await?, Some(1));
    let report = it.applied(&["apiVersion: v1\nkind: ConfigMap\nmetadata: {name: other}"]).await?;
    assert_eq!(about(&report, NAME).action, Action::Forgotten);
    assert_eq!(it.replicas().await?, 6);
    Ok(())
}
