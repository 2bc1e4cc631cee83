//! Pods that admission admits: the API server must accept their Deployments.

use std::sync::Arc;

use controller::{
    model::config_maps::Flag,
    read::parse::admission::{self, AdmissionRequest, AdmittedKind},
    shell::webhook::admission_review::AdmissionSettings,
};
use futures::{StreamExt as _, future, stream};
use kube::{
    Api, Client,
    api::{DynamicObject, PostParams},
};
use serde_json::{Value, json};
use tokio::task::spawn_blocking;

use super::{WebhookReplica, dynamic_api, manifest, service};

/// A pod with nearly every field that may be set, each with a valid value.
const FULL_POD: &str = include_str!("../full_pod.json");

/// Collects the JSON pointers of all scalars, with their values.
fn collect_scalars(value: &Value, at: &str, out: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(name, it)| {
                collect_scalars(it, &format!("{at}/{}", name.replace('/', "~1")), out);
            });
        }
        Value::Array(all) => {
            all.iter()
                .enumerate()
                .for_each(|(number, it)| collect_scalars(it, &format!("{at}/{number}"), out));
        }
        leaf => out.push((at.to_owned(), leaf.clone())),
    }
}

/// Returns replacements of a value: other spellings, and values that formats and ranges exclude.
fn replacements_of(value: &Value) -> Vec<Value> {
    match value {
        Value::String(text) => {
            let spelled =
                [text.to_lowercase(), text.to_uppercase(), format!("{text} "), format!("-{text}")];
            let odd = ["", "a b", "a_b", "A", "1.5", "../a", "a/b", "a..b", "a=b", "\u{e4}"];
            let all = spelled.into_iter().chain(odd.map(str::to_owned)).chain(["a".repeat(64)]);
            all.filter(|it| it != text).map(Value::from).collect()
        }
        Value::Number(_) => {
            [-1i64, 0, 1, 101, 512, 65_536, 1 << 31, 1 << 33].map(Value::from).to_vec()
        }
        _ => Vec::new(),
    }
}

fn settings_with_all_features() -> AdmissionSettings {
    let mut settings = AdmissionSettings::default();
    let features = Arc::make_mut(&mut settings.features);
    for flag in [
        &mut features.podspec_affinity,
        &mut features.podspec_dnsconfig,
        &mut features.podspec_dnspolicy,
        &mut features.podspec_fieldref,
        &mut features.podspec_hostaliases,
        &mut features.podspec_init_containers,
        &mut features.podspec_nodeselector,
        &mut features.podspec_persistent_volume_claim,
        &mut features.podspec_priorityclassname,
        &mut features.podspec_runtimeclassname,
        &mut features.podspec_schedulername,
        &mut features.podspec_securitycontext,
        &mut features.podspec_tolerations,
        &mut features.podspec_topologyspreadconstraints,
        &mut features.podspec_volumes_csi,
        &mut features.podspec_volumes_emptydir,
        &mut features.podspec_volumes_ephemeral,
        &mut features.podspec_volumes_hostpath,
        &mut features.podspec_volumes_mount_propagation,
        &mut features.multi_container,
        &mut features.multi_container_probing,
    ] {
        *flag = Flag::Enabled;
    }
    settings
}

/// Returns true if admission replaces such a value by one that the API server accepts.
fn is_filled_in(at: &str, value: &Value) -> bool {
    // Knative's rules: the case of letters is free; a missing port or port 0 is the serving one; containers get names.
    let ends = [
        "/readinessProbe/httpGet/scheme",
        "Probe/httpGet/port",
        "Probe/tcpSocket/port",
        "/ports/0/containerPort",
    ];
    let steps: Vec<&str> = at.split('/').collect();
    let is_name = matches!(steps[..], ["", "containers" | "initContainers", _, "name"]);
    ends.iter().any(|it| at.ends_with(it)) || (is_name && value == "")
}

/// Returns true if admission admits a service with this pod; called without an API server, as most are refused.
fn is_admitted(pod: &Value, settings: &AdmissionSettings) -> bool {
    let object = manifest("pod", json!({"template": {"spec": pod}}));
    let settings = settings.rule_settings();
    let request = AdmissionRequest {
        kind: AdmittedKind::Service,
        object: &object,
        old: None,
        user: Some("admin"),
        settings,
    };
    let (filled, _) = admission::apply_defaults(&request);
    admission::validate(&AdmissionRequest { object: &filled, ..request }).problems.is_empty()
}

fn service_with_pod(pod: &Value) -> DynamicObject {
    service("pod", json!({"template": {"spec": pod}}))
}

/// Returns the Deployment of such a pod.
fn deployment(pod: &Value) -> DynamicObject {
    let labels = json!({"app": "a"});
    serde_json::from_value(json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "pod"},
        "spec": {"selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod}},
    }))
    .unwrap()
}

/// Pointer of one value of a pod, and its replacement.
struct ValueReplacement {
    pointer: String,
    replacement: Value,
}

/// Returns each value of `full` with each of its replacements.
fn all_replacements(full: &Value) -> Vec<ValueReplacement> {
    let mut all = Vec::new();
    collect_scalars(full, "", &mut all);
    let others = |(at, value): (String, Value)| {
        replacements_of(&value)
            .into_iter()
            .map(move |other| ValueReplacement { pointer: at.clone(), replacement: other })
    };
    all.into_iter().flat_map(others).collect()
}

/// Clients and settings that decide on a pod.
struct AdmissionComparison {
    full_pod: Value,
    settings: Arc<AdmissionSettings>,
    services: Api<DynamicObject>,
    deployments: Api<DynamicObject>,
    dry_run: PostParams,
}

impl AdmissionComparison {
    /// Returns `None` if the pod with this replacement is refused; else `Ok`, or an error if its Deployment is refused.
    async fn compare(self: Arc<Self>, replacement: ValueReplacement) -> Option<Result<(), String>> {
        if is_filled_in(&replacement.pointer, &replacement.replacement) {
            return None;
        }
        let mut pod = self.full_pod.clone();
        *pod.pointer_mut(&replacement.pointer).unwrap() = replacement.replacement.clone();
        // On a thread of its own, so that the requests to the API server go on meanwhile.
        let comparison = Arc::clone(&self);
        let admitted =
            spawn_blocking(move || is_admitted(&pod, &comparison.settings).then_some(pod));
        let pod = admitted.await.unwrap()?;
        let error = match self.deployments.create(&self.dry_run, &deployment(&pod)).await {
            Ok(_) => return Some(Ok(())),
            Err(kube::Error::Api(error)) => error,
            Err(other) => panic!("{} {}: {other}", replacement.pointer, replacement.replacement),
        };
        // The schema may refuse a pod without a call of the webhook.
        Some(match self.services.create(&self.dry_run, &service_with_pod(&pod)).await {
            Ok(_) => Err(format!(
                "{} {}: {}",
                replacement.pointer, replacement.replacement, error.message
            )),
            Err(_) => Ok(()),
        })
    }
}

/// A service that is admitted although the API server refuses its Deployment would never get a pod. So each value of a
/// pod is replaced by many others, and both verdicts are compared.
pub(super) async fn check_can_be_deployed(
    client: &Client,
    namespace: &str,
    leader: &WebhookReplica,
) {
    let settings = Arc::new(settings_with_all_features());
    leader.settings.send_replace(Arc::clone(&settings));
    let comparison = Arc::new(AdmissionComparison {
        full_pod: serde_json::from_str(FULL_POD).unwrap(),
        settings,
        services: dynamic_api(client, namespace, "serving.knative.dev", "v1", "Service"),
        deployments: dynamic_api(client, namespace, "apps", "v1", "Deployment"),
        dry_run: PostParams { dry_run: true, ..PostParams::default() },
    });
    let full_service = service_with_pod(&comparison.full_pod);
    comparison.services.create(&comparison.dry_run, &full_service).await.unwrap();
    let full_deployment = deployment(&comparison.full_pod);
    comparison.deployments.create(&comparison.dry_run, &full_deployment).await.unwrap();
    let all = all_replacements(&comparison.full_pod);
    let tried = all.len();
    let comparisons = all.into_iter().map(|it| Arc::clone(&comparison).compare(it));
    // One response takes a while, but the API server handles many requests at once.
    let admitted: Vec<_> =
        stream::iter(comparisons).buffered(16).filter_map(future::ready).collect().await;
    assert!(tried > 1000 && admitted.len() > 200, "{tried} {}", admitted.len());
    let wrong: Vec<String> = admitted.into_iter().filter_map(Result::err).collect();
    assert!(wrong.is_empty(), "admitted, of {tried}:\n{}", wrong.join("\n"));
}
