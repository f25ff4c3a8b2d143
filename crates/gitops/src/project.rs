//! How a manifest project is to be applied: its entry in the agent's configuration, and what kas knows about
//! it.

use std::{collections::BTreeSet, str::FromStr, time::Duration};

/// A manifest project of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Project {
    /// The number of the agent. With `id` it names the default inventory.
    pub agent: u64,
    /// The number of the manifest project.
    pub id: u64,
    /// The replica that applies, for the fence in the inventory: any text that no other replica uses.
    pub replica: String,
    /// The namespace of the inventory, and of objects that name none.
    pub default_namespace: String,
    /// The only namespaces that objects may be in; objects of the cluster are refused too. `None`: any.
    pub namespaces: Option<BTreeSet<String>>,
    /// Ids of the inventories of the agent's other projects that are not of the form `<agent>-<project>`: a
    /// template must not name one of them.
    pub other_inventories: BTreeSet<String>,
    /// How long applied objects may take until they are current. Zero: nothing is waited for.
    pub reconcile_timeout: Duration,
    /// Whether anything is written.
    pub dry_run: DryRun,
    /// Whether objects that are no longer in the set are deleted.
    pub prune: bool,
    /// How long deleted objects may take until they are gone.
    pub prune_timeout: Duration,
    /// What happens to dependents of a deleted object.
    pub propagation: Propagation,
    /// Which objects may be taken over.
    pub inventory_policy: InventoryPolicy,
}

impl Project {
    /// Returns a project with the defaults of 14.1: prune, foreground, one hour, `must_match`.
    pub fn new(agent: u64, id: u64, default_namespace: &str, replica: &str) -> Self {
        const HOUR: Duration = Duration::from_secs(3_600);
        Self {
            agent,
            id,
            replica: replica.to_owned(),
            default_namespace: default_namespace.to_owned(),
            namespaces: None,
            other_inventories: BTreeSet::new(),
            reconcile_timeout: HOUR,
            dry_run: DryRun::None,
            prune: true,
            prune_timeout: HOUR,
            propagation: Propagation::Foreground,
            inventory_policy: InventoryPolicy::MustMatch,
        }
    }

    /// The id of the default inventory, which is also the end of its name.
    pub fn default_inventory_id(&self) -> String {
        format!("{}-{}", self.agent, self.id)
    }

    /// The name of the default inventory.
    pub fn default_inventory_name(&self) -> String {
        format!("inventory-{}-{}", self.agent, self.id)
    }
}

/// A text that is none of the values of an option.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("found {found:?}; expected {expected}")]
pub struct InvalidOption {
    found: String,
    expected: &'static str,
}

macro_rules! option {
    ($name:ident, $expected:literal, $($text:literal => $variant:ident),+) => {
        /// Reads the text of the configuration; an empty one is the default.
        impl FromStr for $name {
            type Err = InvalidOption;

            fn from_str(text: &str) -> Result<Self, InvalidOption> {
                match text {
                    "" => Ok(Self::default()),
                    $($text => Ok(Self::$variant),)+
                    _ => Err(InvalidOption { found: text.to_owned(), expected: $expected }),
                }
            }
        }
    };
}

/// Whether anything is written: `dry_run_strategy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DryRun {
    /// Everything.
    #[default]
    None,
    /// Nothing, and objects are only read.
    Client,
    /// Nothing, but the API server checks what would be applied.
    Server,
}

option!(DryRun, "none, client or server", "none" => None, "client" => Client, "server" => Server);

/// What happens to dependents of a deleted object: `prune_propagation_policy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Propagation {
    /// They stay.
    Orphan,
    /// They are deleted afterwards.
    Background,
    /// They are deleted first.
    #[default]
    Foreground,
}

option!(
    Propagation, "orphan, background or foreground",
    "orphan" => Orphan, "background" => Background, "foreground" => Foreground
);

impl Propagation {
    /// The value of `propagationPolicy`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Orphan => "Orphan",
            Self::Background => "Background",
            Self::Foreground => "Foreground",
        }
    }
}

/// Which objects may be taken over: `inventory_policy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum InventoryPolicy {
    /// Only new ones, and ones with the mark of this inventory.
    #[default]
    MustMatch,
    /// Also ones without a mark.
    AdoptIfNoInventory,
    /// Any, also with the mark of another inventory.
    AdoptAll,
}

option!(
    InventoryPolicy, "must_match, adopt_if_no_inventory or adopt_all",
    "must_match" => MustMatch, "adopt_if_no_inventory" => AdoptIfNoInventory, "adopt_all" => AdoptAll
);
