//! The label and the annotation that cli-utils gives to inventories and their objects.

/// The label whose value is the id of an inventory.
pub const ID_LABEL: &str = "cli-utils.sigs.k8s.io/inventory-id";

/// The annotation of an object that says which inventory it belongs to: the mark.
pub const OWNER_ANNOTATION: &str = "config.k8s.io/owning-inventory";
