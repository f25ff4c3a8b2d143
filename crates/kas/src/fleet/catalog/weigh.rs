//! How much memory is taken by what was read of a cluster. Whoever writes its objects chooses how long their
//! texts are, so each is counted.

use ::fleet::{
    applications::{Application, Told},
    components::Component,
    inventory::{Service, Workload},
};

use super::{Installed, Key, Known, kept::Weigh};

/// What a text takes beside its bytes, and an entry of a list or a map beside its texts.
const TEXT: usize = 40;
const ENTRY: usize = 64;

fn texts<'a>(texts: impl IntoIterator<Item = &'a str>) -> usize {
    texts.into_iter().map(|text| TEXT + text.len()).sum()
}

fn list<'a>(list: impl IntoIterator<Item = &'a String>) -> usize {
    texts(list.into_iter().map(String::as_str))
}

fn all<'a, T: Weigh + 'a>(items: impl IntoIterator<Item = &'a T>) -> usize {
    items.into_iter().map(Weigh::weigh).sum()
}

impl Weigh for Component {
    fn weigh(&self) -> usize {
        let Self { name, namespace, version, version_from: _, workloads, apis, service } = self;
        ENTRY + list([name, namespace, version, service]) + list(workloads) + list(apis)
    }
}

impl Weigh for Told {
    fn weigh(&self) -> usize {
        let Self { by: _, namespace, instance, name, version, status } = self;
        ENTRY + list([namespace, instance, name, version, status])
    }
}

impl Weigh for Application {
    fn weigh(&self) -> usize {
        let Self { namespace, instance, name, version, version_by: _, status, by } = self;
        ENTRY + list([namespace, instance, name, version, status]) + by.len() * TEXT
    }
}

impl Weigh for Workload {
    fn weigh(&self) -> usize {
        let Self { resource: _, namespace, name, labels, images } = self;
        let images: usize = images.iter().map(|image| list([&image.repository, &image.tag])).sum();
        ENTRY + list([namespace, name]) + images + list(labels.keys().chain(labels.values()))
    }
}

impl Weigh for Service {
    fn weigh(&self) -> usize {
        let Self { namespace, name, labels, is_headless: _, ports } = self;
        let labels = list(labels.keys().chain(labels.values()));
        ENTRY + list([namespace, name]) + labels + ports.len() * size_of::<u16>()
    }
}

impl Weigh for Known {
    fn weigh(&self) -> usize {
        let Self { components, labelled, groups, missing } = self;
        let groups = list(groups.keys().chain(groups.values()));
        ENTRY + all(components) + all(labelled) + groups + list(missing)
    }
}

impl Weigh for Installed {
    fn weigh(&self) -> usize {
        ENTRY + all(&self.applications) + list(&self.missing)
    }
}

impl Weigh for Key {
    fn weigh(&self) -> usize {
        ENTRY + texts(self.reader.as_deref()) + list(&self.namespaces)
    }
}

/// A namespace and the labels of an object in it.
impl Weigh for (String, String) {
    fn weigh(&self) -> usize {
        list([&self.0, &self.1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_long_weighs_more() {
        let long = "x".repeat(10_000);
        let component = |change: fn(&mut Component, String)| {
            let mut component = Component::default();
            change(&mut component, long.clone());
            Known { components: vec![component], ..Known::default() }.weigh()
        };
        for weight in [
            component(|it, long| it.version = long),
            component(|it, long| it.workloads.push(long)),
            Known { missing: vec![long.clone()], ..Known::default() }.weigh(),
            Installed {
                applications: vec![Application { status: long.clone(), ..Application::default() }],
                missing: Vec::new(),
            }
            .weigh(),
        ] {
            assert!((10_000..11_000).contains(&weight), "{weight}");
        }
        assert!(Known::default().weigh() > 0, "an empty answer takes room, too");
    }
}
