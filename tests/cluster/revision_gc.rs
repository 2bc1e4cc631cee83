//! Garbage collection by `config-gc` of a revision with requests in flight: each of them gets its whole response.

use tests::installed_cluster::{RouseCluster, set_config_map};

use super::deletion::{
    find_in_reserve, finish_all, metadata_values, open_at_old_revision, remove_old_tag,
    wait_old_revision_deleted, wait_old_revisions,
};

/// Setting that no unreferenced revision is retained, in force until drop.
struct ImmediateGcSetting<'a>(&'a RouseCluster);

impl<'a> ImmediateGcSetting<'a> {
    fn new(rouse: &'a RouseCluster) -> Self {
        set_gc_limits(rouse, "\"0\"").expect("good values are taken");
        Self(rouse)
    }
}

impl Drop for ImmediateGcSetting<'_> {
    fn drop(&mut self) {
        let _restored = set_gc_limits(self.0, "null");
    }
}

fn set_gc_limits(rouse: &RouseCluster, value: &str) -> Result<String, String> {
    let keys = ["min-non-active-revisions", "max-non-active-revisions"];
    set_config_map(&rouse.cluster, "config-gc", &keys, value)
}

#[test]
fn requests_end_before_their_revision_is_collected() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("collected");
    let namespace = &namespace.name;
    let in_flight = open_at_old_revision(&rouse, namespace);
    let _immediate_gc = ImmediateGcSetting::new(&rouse);
    remove_old_tag(&rouse, namespace);
    // The revisions may be collected at once: their pods drain, and serve the requests to the end.
    wait_old_revisions(&rouse, |name| {
        let names = metadata_values(&rouse, namespace, "revisions", "name")?;
        let is_present = names.iter().any(|it| it == name);
        if is_present { find_in_reserve(&rouse, namespace, name) } else { Some(()) }
    });
    finish_all(&rouse, in_flight);
    wait_old_revision_deleted(&rouse, namespace);
}
