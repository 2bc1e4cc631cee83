use common::outbox::Outbox;
use serde_json::json;

use super::*;
use crate::{
    children::Resource,
    machine::{Effects, Event},
    world::World,
};

const NOW: Stamp = Stamp(1_000_000);

fn machine() -> Machine {
    Machine::new(World::default(), Outbox::new())
}

fn observe(machine: &mut Machine, namespace: &str, name: &str, data: Option<Value>) -> Effects {
    let object = data.map(|data| Box::new(json!({ "data": data })));
    machine.step(NOW, Event::Observe(Resource::ConfigMap, Name::new(namespace, name), object))
}

fn own(machine: &Machine) -> String {
    machine.world().settings.namespace.clone()
}

#[test]
fn a_config_map_changes_what_is_in_force_and_its_end_gives_the_defaults_back() {
    let mut machine = machine();
    let (ours, before) = (own(&machine), Settings::clone(&machine.world().settings));
    let data = json!({ "progress-deadline": "30s", "default-affinity-type": "none" });
    observe(&mut machine, &ours, "config-deployment", Some(data));
    let settings = &machine.world().settings;
    assert_eq!(settings.autoscaler.policy.progress_deadline.as_secs(), 30);
    assert_eq!(settings.children.progress_deadline_seconds, 30);
    assert!(!settings.children.spread_over_nodes);
    let gone = observe(&mut machine, &ours, "config-deployment", None);
    assert_eq!(gone.news.len(), 1);
    let after = &machine.world().settings;
    assert_eq!((&after.autoscaler, &after.children), (&before.autoscaler, &before.children));
}

#[test]
fn a_bad_config_map_is_told_and_changes_nothing() {
    let mut machine = machine();
    let ours = own(&machine);
    let good = json!({ "stable-window": "30s" });
    observe(&mut machine, &ours, "config-autoscaler", Some(good));
    let bad = json!({ "stable-window": "3s" });
    let told = observe(&mut machine, &ours, "config-autoscaler", Some(bad));
    let [ConfigNews { name, event, .. }] = told.news.as_slice() else { panic!("{:?}", told.news) };
    assert_eq!((name.name.as_str(), event.reason), ("config-autoscaler", "ConfigRefused"));
    assert_eq!(machine.world().settings.autoscaler.policy.stable_window.as_secs(), 30);
}

#[test]
fn config_maps_of_other_namespaces_set_nothing() {
    let mut machine = machine();
    let before = Arc::clone(&machine.world().settings);
    let data = json!({ "stable-window": "30s" });
    let told = observe(&mut machine, "somebody", "config-autoscaler", Some(data));
    assert_eq!(told.news, []);
    assert!(Arc::ptr_eq(&before, &machine.world().settings));
}
