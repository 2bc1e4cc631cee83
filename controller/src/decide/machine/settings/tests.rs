use common::outbox::Outbox;
use serde_json::json;

use super::*;
use crate::{
    decide::machine::{ControllerEffects, ControllerEvent},
    model::{cluster_state::ClusterState, object::ResourceKind},
};

const NOW: UnixMillis = UnixMillis(1_000_000);

fn machine() -> ControllerStateMachine {
    ControllerStateMachine::new(ClusterState::default(), Outbox::new())
}

fn observe(
    machine: &mut ControllerStateMachine,
    namespace: &str,
    name: &str,
    data: Option<Value>,
) -> ControllerEffects {
    let object = data.map(|data| Box::new(json!({ "data": data })));
    machine.step(
        NOW,
        ControllerEvent::ObjectObserved {
            resource: ResourceKind::ConfigMap,
            name: NamespacedName::new(namespace, name),
            object,
        },
    )
}

fn system_namespace(machine: &ControllerStateMachine) -> String {
    machine.cluster().settings.system_namespace.clone()
}

#[test]
fn a_config_map_changes_settings_and_its_deletion_restores_defaults() {
    let mut machine = machine();
    let (namespace, old_settings) =
        (system_namespace(&machine), ControllerSettings::clone(&machine.cluster().settings));
    let data = json!({ "progress-deadline": "30s", "default-affinity-type": "none" });
    observe(&mut machine, &namespace, "config-deployment", Some(data));
    let settings = &machine.cluster().settings;
    assert_eq!(settings.scale_policy.policy.progress_deadline.as_secs(), 30);
    assert_eq!(settings.deployment.progress_deadline_seconds, 30);
    assert!(!settings.deployment.spread_over_nodes);
    let effects = observe(&mut machine, &namespace, "config-deployment", None);
    assert_eq!(effects.config_map_events.len(), 1);
    let after = &machine.cluster().settings;
    assert_eq!(
        (&after.scale_policy, &after.deployment),
        (&old_settings.scale_policy, &old_settings.deployment)
    );
}

#[test]
fn a_bad_config_map_is_reported_and_changes_nothing() {
    let mut machine = machine();
    let namespace = system_namespace(&machine);
    let valid = json!({ "stable-window": "30s" });
    observe(&mut machine, &namespace, "config-autoscaler", Some(valid));
    let invalid = json!({ "stable-window": "3s" });
    let effects = observe(&mut machine, &namespace, "config-autoscaler", Some(invalid));
    let [ConfigMapEventRecord { name, event, .. }] = effects.config_map_events.as_slice() else {
        panic!("{:?}", effects.config_map_events)
    };
    assert_eq!((name.name.as_str(), event.reason), ("config-autoscaler", "ConfigRefused"));
    assert_eq!(machine.cluster().settings.scale_policy.policy.stable_window.as_secs(), 30);
}

#[test]
fn only_the_leader_records_events_and_a_new_leader_records_present_warnings() {
    let mut machine = machine();
    let namespace = system_namespace(&machine);
    machine.step(NOW, ControllerEvent::LeadershipChanged(false));
    let invalid = || Some(json!({ "stable-window": "3s" }));
    assert_eq!(
        observe(&mut machine, &namespace, "config-autoscaler", invalid()).config_map_events,
        []
    );
    // A watch that begins again repeats the object.
    observe(&mut machine, &namespace, "config-autoscaler", invalid());
    observe(
        &mut machine,
        &namespace,
        "config-deployment",
        Some(json!({ "progress-deadline": "x" })),
    );
    observe(&mut machine, &namespace, "config-deployment", Some(json!({})));
    let events = machine.step(NOW, ControllerEvent::LeadershipChanged(true)).config_map_events;
    let events: Vec<_> = events.iter().map(|it| (it.name.name.as_str(), it.event.reason)).collect();
    assert_eq!(events, [("config-autoscaler", "ConfigRefused")]);
    assert_eq!(
        machine.step(NOW, ControllerEvent::LeadershipChanged(true)).config_map_events,
        [],
        "once"
    );
}

/// Builds the leader of a cluster with this number of apps.
fn machine_with_apps(app_count: u32) -> ControllerStateMachine {
    let settings =
        ControllerSettings { platform: PlatformKind::Kubernetes, ..ControllerSettings::default() };
    let cluster = ClusterState { settings: Arc::new(settings), ..ClusterState::default() };
    let mut machine = ControllerStateMachine::new(cluster, Outbox::new());
    for app in 0..app_count {
        let name = NamespacedName::new("default", format!("hello-{app}"));
        let spec = json!({"template": {"spec": {"containers": [{"image": "hello:v1"}]}}});
        let uid = format!("00000000-0000-4000-8000-{app:012}");
        let object = json!({
            "metadata": {"name": name.name.as_str(), "namespace": "default", "uid": uid, "generation": 1}, "spec": spec,
        });
        machine.step(
            NOW,
            ControllerEvent::ObjectObserved {
                resource: ResourceKind::Configuration,
                name,
                object: Some(Box::new(object)),
            },
        );
    }
    machine
}

/// Number of apps whose objects are to be checked.
fn checked_apps(effects: &ControllerEffects) -> usize {
    let deployments =
        effects.changed_keys.iter().filter(|it| it.resource == ResourceKind::Deployment);
    deployments.map(|it| it.name.clone()).collect::<std::collections::BTreeSet<_>>().len()
}

#[test]
fn a_change_of_settings_is_brought_to_all_objects_a_few_apps_at_a_time() {
    let mut machine = machine_with_apps(25);
    let namespace = system_namespace(&machine);
    let data = json!({ "default-affinity-type": "none" });
    let effects = observe(&mut machine, &namespace, "config-deployment", Some(data));
    let mut counts = vec![checked_apps(&effects)];
    for turn in 1..=3 {
        let early = machine.step(NOW.plus_ms(turn * 100 - 1), ControllerEvent::Tick);
        assert_eq!(checked_apps(&early), 0);
        let effects = machine.step(NOW.plus_ms(turn * 100), ControllerEvent::Tick);
        counts.push(checked_apps(&effects));
    }
    assert_eq!(counts, [10, 10, 5, 0]);
}

#[test]
fn changes_of_settings_while_objects_are_checked_do_not_check_them_faster() {
    let mut machine = machine_with_apps(25);
    let namespace = system_namespace(&machine);
    let mut counts = Vec::new();
    for affinity in ["none", "prefer-spread-revision-over-nodes", "none"] {
        let data = json!({ "default-affinity-type": affinity });
        let effects = observe(&mut machine, &namespace, "config-deployment", Some(data));
        counts.push(checked_apps(&effects));
    }
    for turn in 1..=4 {
        let effects = machine.step(NOW.plus_ms(turn * 100), ControllerEvent::Tick);
        counts.push(checked_apps(&effects));
    }
    // The last change concerns all apps again, also those that were checked for the first.
    assert_eq!(counts, [10, 0, 0, 10, 10, 5, 0]);
}

#[test]
fn config_maps_of_other_namespaces_set_nothing() {
    let mut machine = machine();
    let old_settings = Arc::clone(&machine.cluster().settings);
    let data = json!({ "stable-window": "30s" });
    let effects = observe(&mut machine, "other-namespace", "config-autoscaler", Some(data));
    assert_eq!(effects.config_map_events, []);
    assert!(Arc::ptr_eq(&old_settings, &machine.cluster().settings));
}

#[test]
fn the_table_has_one_request_log_template_and_keeps_the_last_valid_one() {
    fn request_log_in_table(machine: &ControllerStateMachine) -> Option<(String, bool)> {
        match machine.route_message(&RouteKey::Settings)? {
            RouteChange::Settings(it) => {
                it.request_log.map(|it| (it.template.source().to_owned(), it.logs_probes))
            }
            other => panic!("{other:?}"),
        }
    }
    let mut machine = machine();
    let namespace = system_namespace(&machine);
    let mut cursor = machine.routes().subscribe();
    // The first batch is the snapshot.
    cursor.try_next();
    let mut changes_table = |machine: &mut ControllerStateMachine, data: Option<Value>| {
        observe(machine, &namespace, "config-observability", data);
        let changes = cursor.try_next().map(|batch| batch.changes).unwrap_or_default();
        changes.iter().any(|(key, _)| *key == RouteKey::Settings)
    };
    let log = |template: &str| {
        Some(json!({
            "logging.enable-request-log": "true",
            "logging.request-log-template": template,
            "logging.enable-probe-request-log": "true",
        }))
    };
    assert!(changes_table(&mut machine, log("{{.TraceID}}")));
    let first = Some(("{{.TraceID}}".to_owned(), true));
    assert_eq!(request_log_in_table(&machine), first);
    let unsupported = log("{{if .TraceID}}a{{end}}");
    assert!(!changes_table(&mut machine, unsupported), "a template that cannot be used");
    assert_eq!(request_log_in_table(&machine), first);
    assert!(changes_table(&mut machine, log("{{.Request.Method}}")));
    assert_eq!(request_log_in_table(&machine), Some(("{{.Request.Method}}".to_owned(), true)));
    assert!(changes_table(&mut machine, None));
    assert_eq!(request_log_in_table(&machine), None);
}

#[test]
fn the_table_has_the_trusted_proxies_of_gateways() {
    let mut machine = machine();
    let namespace = system_namespace(&machine);
    let edge = |machine: &ControllerStateMachine| match machine.route_message(&RouteKey::Settings) {
        Some(RouteChange::Settings(it)) => it.edge,
        other => panic!("{other:?}"),
    };
    let data = json!({"rouse.dev.trusted-proxies": "10.0.0.0/8"});
    observe(&mut machine, &namespace, "config-network", Some(data));
    let settings = edge(&machine);
    assert!(
        settings.is_trusted_proxy([10, 1, 2, 3].into())
            && !settings.is_trusted_proxy([11, 1, 2, 3].into())
    );
    let invalid = json!({"rouse.dev.trusted-proxies": "all"});
    observe(&mut machine, &namespace, "config-network", Some(invalid));
    assert_eq!(edge(&machine), settings, "the last valid value holds");
    observe(&mut machine, &namespace, "config-network", None);
    assert_eq!(machine.route_message(&RouteKey::Settings), None);
}
