//! The rows of ConfigMaps: each key changes the result of some service, or a warning states that it does not.

use std::sync::LazyLock;

use super::*;
use crate::model::config_maps;

/// Keys that are recognized by their prefix, or that may have any name.
const BY_PREFIX: [(&str, &str); 5] = [
    ("config-domain", "example.org"),
    ("config-leader-election", "map-lease-prefix.a"),
    ("config-logging", "loglevel.controller"),
    ("config-logging", "loglevel.webhook"),
    ("config-tracing", "backend"),
];

/// Returns services that differ in everything that ConfigMaps may affect.
fn samples() -> Vec<Value> {
    let sample = |name: &str, change: fn(&mut Value)| {
        let mut it = service();
        it["metadata"]["name"] = name.into();
        change(&mut it);
        it
    };
    let annotated = |it: &mut Value, name: &str, value: &str| {
        it["spec"]["template"]["metadata"]["annotations"][name] = value.into();
    };
    let mut rps = sample("rps", |_| {});
    annotated(&mut rps, "autoscaling.knative.dev/metric", "rps");
    let mut asleep = sample("asleep", |_| {});
    annotated(&mut asleep, "autoscaling.knative.dev/initial-scale", "0");
    let mut large = sample("large", |_| {});
    annotated(&mut large, "autoscaling.knative.dev/max-scale", "50");
    vec![
        sample("plain", |_| {}),
        rps,
        asleep,
        large,
        sample("tagged", |it| {
            let tag = json!({"latestRevision": true, "percent": 0, "tag": "blue"});
            it["spec"]["traffic"] = json!([{"latestRevision": true, "percent": 100}, tag]);
        }),
        sample("long", |it| it["spec"]["template"]["spec"]["timeoutSeconds"] = 700.into()),
        sample("broad", |it| it["spec"]["template"]["spec"]["containerConcurrency"] = 2000.into()),
        sample("boundless", |it| it["spec"]["template"]["spec"]["containerConcurrency"] = 0.into()),
        sample("pair", |it| {
            let probe = json!({"httpGet": {"port": 9000}});
            it["spec"]["template"]["spec"]["containers"] = json!([
                {"image": "hello:v1", "ports": [{"containerPort": 8080}]},
                {"image": "beside:v1", "readinessProbe": probe},
            ]);
        }),
        sample("claim", |it| {
            let spec = &mut it["spec"]["template"]["spec"];
            let claim = json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}});
            spec["volumes"] = json!([claim]);
            spec["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
        }),
        sample("first", |it| {
            it["spec"]["template"]["spec"]["initContainers"] = json!([{"image": "init:v1"}]);
        }),
    ]
}

/// Services with a field that needs a feature, from the page's own rows.
static GUARDED: LazyLock<Vec<Value>> = LazyLock::new(|| {
    let all = rows();
    let guarded = all.iter().filter(|it| it.effect.starts_with("works with `kubernetes."));
    guarded.filter_map(object_with_field).map(|(_, object)| object).collect()
});

/// ConfigMaps, each with its name.
type ConfigMapData<'a> = [(&'a str, &'a Value)];

/// Returns true if the ConfigMaps change the objects, the verdict or the table of any sample.
fn change_any_result(with: &ConfigMapData<'_>, without: &ConfigMapData<'_>) -> bool {
    static SAMPLES: LazyLock<Vec<Value>> = LazyLock::new(samples);
    static DEFAULT_RESULTS: LazyLock<Vec<String>> =
        LazyLock::new(|| SAMPLES.iter().map(|it| service_result(it, &[])).collect());
    let all = SAMPLES.iter().zip(DEFAULT_RESULTS.iter());
    let is_changed = |(sample, default_result): (&Value, &String)| match without {
        [] => service_result(sample, with) != *default_result,
        _ => service_result(sample, with) != service_result(sample, without),
    };
    let are_verdicts_changed =
        verdicts_and_digest_request(with) != verdicts_and_digest_request(without);
    are_verdicts_changed || all.into_iter().any(is_changed)
}

fn api_server_with_configs(maps: &ConfigMapData<'_>) -> FakeApiServer {
    let mut api_server = FakeApiServer::new();
    api_server.other_replica = None;
    for (name, data) in maps {
        api_server.set_config_map(name, (*data).clone());
    }
    api_server
}

/// Returns the result of a service and of a second Revision of it, or the refusal.
fn service_result(sample: &Value, maps: &ConfigMapData<'_>) -> String {
    let mut api_server = api_server_with_configs(maps);
    let mut newer = sample.clone();
    newer["spec"]["template"]["spec"]["containers"][0]["image"] = "hello:v2".into();
    let mut problems = Vec::new();
    for object in [sample.clone(), newer] {
        problems.push(try_to_make(&mut api_server, object));
        api_server.report_all_ready();
    }
    let others =
        api_server.objects.iter().filter(|((resource, _), _)| *resource != ResourceKind::ConfigMap);
    let others: Vec<String> = others.map(|(at, it)| format!("{at:?} {it}")).collect();
    format!("{problems:?}\n{others:?}\n{:?}", api_server.table())
}

/// Returns the verdicts on fields that need a feature, and the request for digests.
fn verdicts_and_digest_request(maps: &ConfigMapData<'_>) -> String {
    let mut api_server = api_server_with_configs(maps);
    let configs = api_server.machine.cluster().settings.config_maps.clone();
    let verdicts: Vec<String> = GUARDED.iter().map(|it| judge(it.clone(), &configs).1).collect();
    api_server.completes_digests = false;
    try_to_make(&mut api_server, service());
    format!("{verdicts:?}\n{:?}", api_server.machine.digest_request(&name("hello-00001")))
}

/// Returns a defaulted object and its verdict.
fn judge(object: Value, configs: &config_maps::Configs) -> (Value, String) {
    let settings = RuleSettings {
        platform: PlatformKind::Kubernetes,
        defaults: &configs.defaults,
        features: &configs.features,
        autoscaler: &configs.autoscaler,
        cluster_domain: "cluster.local",
        trusts_ingresses: configs.network.trusts_ingresses(),
    };
    let ask = AdmissionRequest {
        kind: AdmittedKind::Service,
        object: &object,
        old: None,
        user: None,
        settings,
    };
    let (filled, _) = apply_defaults(&ask);
    let result = validate(&AdmissionRequest { object: &filled, ..ask });
    (filled, crate::model::problem::problems_line(&result.problems))
}

fn try_to_make(api_server: &mut FakeApiServer, object: Value) -> String {
    let configs = api_server.machine.cluster().settings.config_maps.clone();
    let (filled, problems) = judge(object, &configs);
    if problems.is_empty() {
        let service_name = name(filled["metadata"]["name"].as_str().expect("a name"));
        for event in api_server.apply(ResourceKind::KnativeService, &service_name, filled) {
            api_server.step(event);
        }
    }
    problems
}

/// Returns two data maps: one with a row's key and any key that it depends on, one without the row's key.
fn data(row: &FieldRow, rest: &str) -> (Value, Value) {
    let required_key = rest.strip_prefix("with `").and_then(|it| it.split('`').next());
    let mut without = json!({});
    if let Some((key, value)) = required_key.and_then(|it| it.split_once('=')) {
        without[key] = value.into();
    }
    let mut with = without.clone();
    with[&row.field] = row.value.clone();
    (with, without)
}

pub(super) fn try_row(row: &FieldRow, word: &str, rest: &str) {
    let context = format!("{} {} {}", row.on, row.field, row.value);
    let (with, without) = data(row, rest);
    let texts = |it: &Value| serde_json::from_value(it.clone()).expect("texts");
    let admitted = config_maps::admit(&row.on, &BTreeMap::new(), &texts(&with));
    let warnings = admitted.unwrap_or_else(|problems| panic!("{context}: {problems:?}"));
    // An older name is read as the newer one, and the warning names the newer one.
    let older = format!("key {:?} is of an older release: use ", row.field);
    let newer = warnings.iter().find_map(|it| it.strip_prefix(&older));
    let field = newer.map_or(row.field.as_str(), |it| it.trim_matches('"'));
    let is_warning = |it: &String| it.contains("has no effect") && it.contains(field);
    assert_eq!(warnings.iter().any(is_warning), word == "warned", "{context}: {warnings:?}");
    assert!(!warnings.iter().any(|it| it.contains("is unknown")), "{context}: {warnings:?}");
    // Only the row's own feature is on, but for rows about init containers, which need theirs.
    let init = json!({"kubernetes.podspec-init-containers": "enabled"});
    let about_init = row.field.starts_with("init-container");
    let more: &[_] = if about_init { &[("config-features", &init)] } else { &[] };
    let (with, without) = ((row.on.as_str(), &with), (row.on.as_str(), &without));
    let without: &[_] = if *without.1 == json!({}) { &[] } else { &[without] };
    match word {
        "works" => {
            let (with, without) = ([more, &[with]].concat(), [more, without].concat());
            assert!(change_any_result(&with, &without), "{context} changes nothing");
        }
        "warned" => {}
        other => panic!("{context}: what does {other:?} mean?"),
    }
}

/// A key that is added to the code must be added to the page.
#[test]
fn the_page_has_every_key_of_every_config_map() {
    let rows = rows();
    let on_page = |map: &str, key: &str| rows.iter().any(|it| it.on == map && it.field == key);
    for map in config_maps::NAMES {
        for key in config_maps::known(map) {
            assert!(on_page(map, &key), "{map} {key}");
        }
    }
    for (map, key) in BY_PREFIX {
        assert!(on_page(map, key), "{map} {key}");
    }
}

/// Returns how many of six Revisions, made an hour apart, are left ten hours later.
fn survivors(data: Value) -> usize {
    let mut api_server = FakeApiServer::new();
    api_server.other_replica = None;
    api_server.set_config_map("config-gc", data);
    for version in 1..=6 {
        api_server.apply_service("hello", &format!("hello:v{version}"), 0, Value::Null);
        api_server.now = api_server.now.plus_ms(3_600_000);
        api_server.step(ControllerEvent::Tick);
    }
    api_server.now = api_server.now.plus_ms(36_000_000);
    api_server.step(ControllerEvent::Tick);
    api_server.names(ResourceKind::Revision).len()
}

#[test]
fn old_revisions_go_as_config_gc_says() {
    let all = |min: &str, max: &str, create: &str, active: &str| {
        survivors(json!({
            "min-non-active-revisions": min, "max-non-active-revisions": max,
            "retain-since-create-time": create, "retain-since-last-active-time": active,
        }))
    };
    assert_eq!(survivors(json!({})), 6);
    // The newest Revision does not count.
    assert_eq!(all("1", "3", "1h", "1h"), 2);
    assert_eq!(all("2", "3", "1h", "1h"), 3, "min-non-active-revisions");
    assert_eq!(all("1", "3", "48h", "1h"), 4, "retain-since-create-time");
    assert_eq!(all("1", "3", "1h", "48h"), 4, "retain-since-last-active-time");
    assert_eq!(all("1", "2", "48h", "48h"), 3, "max-non-active-revisions");
}

#[test]
fn an_unschedulable_pod_is_no_failure_if_the_cluster_grows() {
    let resources_available = |data: Value| {
        let mut api_server = FakeApiServer::new();
        api_server.set_config_map("config-deployment", data);
        api_server.apply_service("hello", "hello:v1", 1, Value::Null);
        let pod =
            api_server.names(ResourceKind::Pod).into_iter().find(|it| it.namespace == NAMESPACE);
        let pod = pod.expect("a pod");
        let mut object = api_server.objects[&(ResourceKind::Pod, pod.clone())].clone();
        object["status"] = json!({"phase": "Pending", "conditions": [{
            "type": "PodScheduled", "status": "False",
            "reason": "Unschedulable", "message": "0/3 nodes are available",
        }]});
        api_server.objects.insert((ResourceKind::Pod, pod.clone()), object.clone());
        api_server.step(ControllerEvent::ObjectObserved {
            resource: ResourceKind::Pod,
            name: pod,
            object: Some(Box::new(object)),
        });
        api_server.condition(ResourceKind::Revision, "hello-00001", "ResourcesAvailable")
    };
    assert_eq!(resources_available(json!({})), "False Unschedulable: 0/3 nodes are available");
    let data = json!({"pod-is-always-schedulable": "true"});
    assert_eq!(resources_available(data), "Unknown Deploying: ");
}
