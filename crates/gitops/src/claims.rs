//! Which project of an agent writes which inventory.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use parking_lot::Mutex;

/// The inventories of an agent's projects. Two projects that write the same one would delete each other's
/// objects, so the first one keeps it for as long as the configuration names it.
#[derive(Debug, Default)]
pub struct Claims {
    /// The project that writes an inventory, by the inventory's id. A project has one at most.
    owners: Mutex<HashMap<String, Arc<str>>>,
}

impl Claims {
    /// Notes that a project writes an inventory, and no longer the one before.
    ///
    /// # Errors
    /// Another project writes it: its name.
    pub fn claim(&self, project: &Arc<str>, id: &str) -> Result<(), Arc<str>> {
        let mut owners = self.owners.lock();
        match owners.get(id) {
            Some(owner) if owner == project => Ok(()),
            Some(owner) => Err(Arc::clone(owner)),
            None => {
                owners.retain(|_, owner| owner != project);
                owners.insert(id.to_owned(), Arc::clone(project));
                Ok(())
            }
        }
    }

    /// Returns the ids of the inventories of all other projects.
    pub fn others(&self, project: &str) -> BTreeSet<String> {
        let owners = self.owners.lock();
        owners.iter().filter(|(_, owner)| ***owner != *project).map(|(id, _)| id.clone()).collect()
    }

    /// Forgets a project.
    pub fn release(&self, project: &str) {
        self.owners.lock().retain(|_, owner| **owner != *project);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inventory_is_of_the_first_project_until_that_leaves() {
        let claims = Claims::default();
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        assert_eq!(claims.claim(&a, "shop"), Ok(()));
        assert_eq!(claims.claim(&a, "shop"), Ok(()));
        assert_eq!(claims.claim(&b, "shop"), Err(Arc::clone(&a)));
        assert_eq!(claims.others("b"), BTreeSet::from(["shop".to_owned()]));
        assert_eq!(claims.others("a"), BTreeSet::new());
        assert_eq!(claims.claim(&a, "3-7"), Ok(()));
        assert_eq!(claims.claim(&b, "shop"), Ok(()));
        claims.release("b");
        assert_eq!(claims.claim(&a, "shop"), Ok(()));
        assert_eq!(claims.claim(&b, "3-7"), Ok(()));
    }
}
