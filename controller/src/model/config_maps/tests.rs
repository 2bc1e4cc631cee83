use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn data(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|&(key, text)| (key.into(), text.into())).collect()
}

fn reasons(update: &ConfigMapUpdate) -> Vec<&'static str> {
    update.events.iter().map(|it| it.reason).collect()
}

#[test]
fn an_invalid_value_keeps_the_last_valid_one_and_is_reported_once() {
    let mut configs = Configs::default();
    let valid = data(&[("retain-since-create-time", "1h")]);
    let invalid = data(&[("retain-since-create-time", "1hour")]);
    assert_eq!(
        configs.update("config-gc", Some(&valid)),
        ConfigMapUpdate { is_changed: true, has_new_data: true, events: vec![] }
    );
    let update = configs.update("config-gc", Some(&invalid));
    assert_eq!((update.is_changed, reasons(&update)), (false, vec!["ConfigRefused"]));
    assert_eq!(
        update.events[0].message,
        "config-gc: failed to parse retain-since-create-time: time: unknown unit \"hour\" in \
         duration \"1hour\". The settings before it hold"
    );
    assert_eq!(configs.update("config-gc", Some(&invalid)), ConfigMapUpdate::default());
    assert_eq!(configs.gc.since_created, Some(Duration::from_secs(3600)));
    assert_eq!(
        configs.refused_config_maps().map(|(name, _)| name).collect::<Vec<_>>(),
        ["config-gc"]
    );
    let mended = configs.update("config-gc", Some(&valid));
    assert_eq!((mended.is_changed, reasons(&mended)), (false, vec!["ConfigAccepted"]));
    assert_eq!(configs.refused_config_maps().count(), 0);
}

#[test]
fn a_config_map_that_is_gone_falls_back_to_its_defaults() {
    let mut configs = Configs::default();
    configs.update("config-defaults", Some(&data(&[("container-concurrency", "7")])));
    assert_eq!(configs.defaults.container_concurrency, 7);
    let update = configs.update("config-defaults", None);
    assert_eq!((update.is_changed, reasons(&update)), (true, vec!["ConfigDeleted"]));
    assert_eq!(configs, Configs::default());
    assert_eq!(configs.update("config-defaults", None), ConfigMapUpdate::default());
}

#[test]
fn hints_are_reported_although_the_value_applies() {
    let mut configs = Configs::default();
    let update = configs.update("config-deployment", Some(&data(&[("progressDeadline", "30s")])));
    assert_eq!((update.is_changed, reasons(&update)), (true, vec!["ConfigHint"]));
    assert_eq!(configs.deployment.progress_deadline, Duration::from_secs(30));
}

#[test]
fn objects_are_read_as_the_api_server_holds_them() {
    let mut configs = Configs::default();
    let object = serde_json::json!({
        "kind": "ConfigMap", "metadata": { "name": "config-features" },
        "data": { "multi-container": "disabled" },
    });
    assert!(configs.observe("config-features", Some(&object)).is_changed);
    assert_eq!(configs.features.multi_container, Flag::Disabled);
    let empty = serde_json::json!({ "metadata": { "name": "config-features" } });
    assert!(configs.observe("config-features", Some(&empty)).is_changed);
    assert_eq!(*configs.features, Features::default());
}

#[test]
fn other_config_maps_have_no_effect() {
    let mut configs = Configs::default();
    let foreign = data(&[("anything", "goes")]);
    assert_eq!(configs.update("config-map-of-others", Some(&foreign)), ConfigMapUpdate::default());
    assert_eq!(admit("config-map-of-others", &foreign, &foreign), Ok(vec![]));
}

#[test]
fn admission_refuses_invalid_config_maps() {
    let none = BTreeMap::new();
    let typo = admit("config-network", &none, &data(&[("domain-temlate", "x")]));
    let hint = "key \"domain-temlate\" is unknown and has no effect";
    assert_eq!(typo, Ok(vec![hint.to_owned()]));
    let problems =
        admit("config-network", &none, &data(&[("rollout-duration", "-1")])).unwrap_err();
    assert_eq!(problems_line(&problems), "rollout-duration must be a positive integer, but was -1");
    let shipped = data(&[(example::CHECKSUM_ANNOTATION, "00000001")]);
    assert!(admit("config-network", &shipped, &data(&[("_example", "edited")])).is_err());
}

/// Generates values that some key accepts, and values that none does.
fn some_text() -> impl Strategy<Value = String> {
    prop_oneof![
        "[0-9]{1,4}",
        "-?[0-9]{1,3}(s|m|h|ms|\\.5s)",
        Just("enabled".to_owned()),
        Just("disabled".to_owned()),
        Just("true".to_owned()),
        Just("false".to_owned()),
        Just("{{.Name}}.{{.Domain}}".to_owned()),
        Just("selector:\n  a: b\n".to_owned()),
        "\\PC{0,40}",
        "[{}.a-zA-Z \"|()$:=\\-]{0,40}",
    ]
}

fn some_key() -> impl Strategy<Value = String> {
    const KEYS: &[&str] = &[
        "_example",
        "domain-template",
        "tag-template",
        "rollout-duration",
        "http-protocol",
        "retain-since-create-time",
        "min-non-active-revisions",
        "max-non-active-revisions",
        "revision-timeout-seconds",
        "container-concurrency",
        "container-name-template",
        "revision-cpu-request",
        "stable-window",
        "max-scale",
        "min-scale",
        "initial-scale",
        "target-burst-capacity",
        "multi-container",
        "progress-deadline",
        "runtime-class-name",
        "lease-duration",
        "zap-logger-config",
        "loglevel.controller",
        "tracing-sampling-rate",
        "metrics-protocol",
        "logging.request-log-template",
        "issuerRef",
        "example.com",
        "namespace-wildcard-cert-selector",
        "autoTLS",
        "progressDeadline",
    ];
    prop_oneof![4 => prop::sample::select(KEYS).prop_map(str::to_owned), 1 => "[a-z.-]{1,12}"]
}

proptest! {
    /// For any input nothing panics, a ConfigMap that cannot be read changes nothing, and admission accepts exactly
    /// what is followed.
    #[test]
    fn the_last_good_settings_always_stay(
        updates in prop::collection::vec(
            (
                prop::sample::select(NAMES),
                prop::option::weighted(
                    0.9,
                    prop::collection::btree_map(some_key(), some_text(), 0..4),
                ),
            ),
            1..20,
        ),
    ) {
        let mut configs = Configs::default();
        for (name, data) in updates {
            let previous = configs.clone();
            let update = configs.update(name, data.as_ref());
            let refused = configs.refused_config_maps().any(|(it, _)| it == name);
            let mut updated = configs.clone();
            updated.seen = previous.seen.clone();
            prop_assert_eq!(update.is_changed, updated != previous);
            let Some(data) = data else {
                prop_assert!(!refused);
                continue;
            };
            prop_assert_eq!(admit(name, &BTreeMap::new(), &data).is_err(), refused);
            prop_assert!(!(refused && update.is_changed));
            prop_assert_eq!(configs.update(name, Some(&data)), ConfigMapUpdate::default());
        }
    }
}
