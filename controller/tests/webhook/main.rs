//! CRDs and admission against a real API server.
//!
//! Run by the cluster tier, which starts etcd and an API server of their own and names its kubeconfig in
//! `ROUSE_TEST_APISERVER`. Without one this test fails. The API server must run on this machine: it calls the webhook
//! at 127.0.0.1.
#![allow(
    clippy::unwrap_used,
    reason = "a panic in a test names the line, which is what a test is for"
)]

mod admitted_pods;

use std::{path::PathBuf, sync::Arc, time::Duration};

use controller::{
    model::object::FIELD_MANAGER,
    shell::{
        api::{client::connect, leader_election::Leadership},
        webhook::{
            self, WebhookSettingsSource, admission_review::AdmissionSettings,
            certificates::WebhookCertResolver, configurations::WebhookAddress, registration,
        },
    },
    write::crds,
};
use k8s_openapi::{
    api::{
        admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration},
        core::v1::{ConfigMap, Namespace, Secret},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

const WEBHOOK_NAMES: [&str; 3] = [
    "webhook.serving.knative.dev",
    "validation.webhook.serving.knative.dev",
    "config.webhook.serving.knative.dev",
];

async fn client() -> Client {
    let file = std::env::var_os("ROUSE_TEST_APISERVER")
        .expect("ROUSE_TEST_APISERVER names no kubeconfig: run `cargo xtask test --tier cluster`");
    connect(Some(&PathBuf::from(file))).await.unwrap()
}

async fn apply_crds(client: &Client) {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    let params = PatchParams::apply(FIELD_MANAGER).force();
    for crd in crds::all_definitions() {
        let name = crd["metadata"]["name"].as_str().unwrap().to_owned();
        api.patch(&name, &params, &Patch::Apply(&crd)).await.unwrap();
        let established = async {
            loop {
                let status = api.get(&name).await.unwrap().status.unwrap_or_default();
                let all = status.conditions.unwrap_or_default();
                if all.iter().any(|it| it.type_ == "Established" && it.status == "True") {
                    return;
                }
                sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(Duration::from_secs(30), established).await.expect(&name);
    }
}

/// A controller's webhook, with its registration, which this process maintains.
struct WebhookReplica {
    certificates: Arc<WebhookCertResolver>,
    settings: watch::Sender<Arc<AdmissionSettings>>,
    stop: CancellationToken,
}

async fn start_replica(client: &Client, namespace: &str, leadership: Leadership) -> WebhookReplica {
    let listener = webhook::listen(([127, 0, 0, 1], 0).into()).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let webhook_address = WebhookAddress {
        url: Some(format!("https://127.0.0.1:{port}")),
        ..WebhookAddress::new(namespace, port)
    };
    let (settings, in_force) = watch::channel(Arc::new(AdmissionSettings::default()));
    let in_force: WebhookSettingsSource = Arc::new(move || Arc::clone(&in_force.borrow()));
    let (certificates, stop) = (Arc::new(WebhookCertResolver::default()), CancellationToken::new());
    let context = webhook::AdmissionContext::without_placement(in_force.clone());
    tokio::spawn(webhook::serve(listener, Arc::clone(&certificates), context, stop.clone()));
    let (client, shared_certificates) = (client.clone(), Arc::clone(&certificates));
    tokio::spawn(registration::keep_registered(
        client,
        webhook_address,
        shared_certificates,
        in_force,
        leadership,
        stop.clone(),
    ));
    WebhookReplica { certificates, settings, stop }
}

/// Waits until the API server has the certificate of the Secret.
async fn wait_until_registered(client: &Client, authority: &str) {
    let api: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    let registered = async {
        loop {
            let bundle = api
                .get_opt(WEBHOOK_NAMES[0])
                .await
                .unwrap()
                .and_then(|it| it.webhooks?.first()?.client_config.ca_bundle.clone());
            if bundle.is_some_and(|it| it.0 == authority.as_bytes()) {
                return;
            }
            sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(Duration::from_secs(30), registered).await.expect("registered");
}

async fn wait_for_authority(certificates: &WebhookCertResolver) -> String {
    let has_authority = async {
        loop {
            if let Some(bundle) = certificates.bundle() {
                return bundle.authority;
            }
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(Duration::from_secs(30), has_authority).await.expect("a certificate")
}

fn dynamic_api(
    client: &Client,
    namespace: &str,
    group: &str,
    version: &str,
    kind: &str,
) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk(group, version, kind);
    Api::namespaced_with(client.clone(), namespace, &ApiResource::from_gvk(&kind))
}

fn service(name: &str, spec: Value) -> DynamicObject {
    serde_json::from_value(manifest(name, spec)).unwrap()
}

fn manifest(name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": spec,
    })
}

fn template(container: Value) -> Value {
    json!({"template": {"spec": {"containers": [container]}}})
}

/// Returns the message with which the API server refused `object`.
async fn refusal(api: &Api<DynamicObject>, object: &DynamicObject) -> String {
    match api.create(&PostParams::default(), object).await {
        Ok(accepted) => panic!("accepted: {}", serde_json::to_string(&accepted).unwrap()),
        Err(kube::Error::Api(status)) => status.message,
        Err(other) => panic!("{other}"),
    }
}

/// Removes the registration, also after a failure: a webhook without a server would stop every later test.
async fn unregister(client: &Client) {
    let mutating: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    let validating: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    let _ = mutating.delete(WEBHOOK_NAMES[0], &Default::default()).await;
    for name in &WEBHOOK_NAMES[1..] {
        let _ = validating.delete(name, &Default::default()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_api_server_calls_the_webhooks_before_it_stores_an_object() {
    let client = client().await;
    let done = tokio::spawn(run_all_checks(client.clone())).await;
    unregister(&client).await;
    if let Err(panic) = done {
        std::panic::resume_unwind(panic.into_panic());
    }
}

async fn run_all_checks(client: Client) {
    let namespace = format!("webhook-{}", std::process::id());
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let mut object = Namespace::default();
    object.metadata.name = Some(namespace.clone());
    namespaces.create(&PostParams::default(), &object).await.unwrap();
    apply_crds(&client).await;
    let leader = start_replica(&client, &namespace, Leadership::permanent()).await;
    let authority = wait_for_authority(&leader.certificates).await;
    wait_until_registered(&client, &authority).await;

    check_defaulting_and_validation(&client, &namespace).await;
    check_settings_apply_at_once(&client, &namespace, &leader).await;
    check_config_maps(&client, &namespace).await;
    admitted_pods::check_can_be_deployed(&client, &namespace, &leader).await;
    check_certificate_rotation(&client, &namespace, &leader).await;
    leader.stop.cancel();
    namespaces.delete(&namespace, &Default::default()).await.unwrap();
}

async fn check_defaulting_and_validation(client: &Client, namespace: &str) {
    let services = dynamic_api(client, namespace, "serving.knative.dev", "v1", "Service");
    let create = PostParams::default();
    let created = services.create(&create, &service("a", template(json!({"image": "a"})))).await;
    let created = created.unwrap();
    let container = &created.data["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container["name"], "user-container");
    assert_eq!(created.data["spec"]["traffic"][0]["latestRevision"], true);
    let annotations = created.metadata.annotations.clone().unwrap_or_default();
    assert_eq!(annotations["serving.knative.dev/creator"], "admin");

    let refused = |container| {
        let (services, object) = (services.clone(), service("b", template(container)));
        async move { refusal(&services, &object).await }
    };
    const DENIED: &str = "admission webhook \"validation.webhook.serving.knative.dev\" denied the request: validation failed: ";
    let at = "spec.template.spec.containers[0]";
    let error = refused(json!({"image": "a", "env": [{"name": "PORT", "value": "1"}]})).await;
    let expected = format!("{DENIED}\"PORT\" is a reserved environment variable: {at}.env[0].name");
    assert_eq!(error, expected);
    // A field that no CRD schema names must reach the webhook, which refuses it.
    let hook = json!({"image": "a", "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}});
    assert_eq!(refused(hook).await, format!("{DENIED}must not set the field(s): {at}.lifecycle"));
    let split = json!({
        "template": {"spec": {"containers": [{"image": "a"}]}},
        "traffic": [{"percent": 60}, {"revisionName": "b-1", "percent": 60}],
    });
    let error = refusal(&services, &service("b", split)).await;
    assert_eq!(error, format!("{DENIED}Traffic targets sum to 120, want 100: spec.traffic"));

    // The schema itself refuses these two.
    let percent = json!({
        "template": {"spec": {"containers": [{"image": "a"}]}},
        "traffic": [{"percent": 101}],
    });
    let error = refusal(&services, &service("b", percent)).await;
    assert!(error.contains("expected 0 <= percent <= 100"), "{error}");
    let named = json!({"template": {
        "metadata": {"name": "x-1"},
        "spec": {"containers": [{"image": "a"}]},
    }});
    let error = refusal(&services, &service("b", named)).await;
    assert!(error.contains("\"x-1\" must have prefix \"b-\""), "{error}");

    let typo = json!({"image": "a", "imagge": "b"});
    let accepted = services.create(&create, &service("typo", template(typo))).await.unwrap();
    let container = &accepted.data["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container.get("imagge"), None, "{container}");

    check_revisions_are_immutable(client, namespace).await;
}

async fn check_revisions_are_immutable(client: &Client, namespace: &str) {
    let revisions = dynamic_api(client, namespace, "serving.knative.dev", "v1", "Revision");
    let revision: DynamicObject = serde_json::from_value(json!({
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Revision",
        "metadata": {"name": "a-00001"},
        "spec": {"containers": [{"image": "a"}]},
    }))
    .unwrap();
    revisions.create(&PostParams::default(), &revision).await.unwrap();
    let patch = json!({"spec": {"timeoutSeconds": 7}});
    let changed = revisions.patch("a-00001", &PatchParams::default(), &Patch::Merge(&patch)).await;
    let Err(kube::Error::Api(status)) = changed else { panic!("{changed:?}") };
    assert!(status.message.contains("Immutable fields changed (-old +new): spec\ntimeoutSeconds:"));
    // An update of a status does not call the webhook.
    let patch = json!({"status": {"observedGeneration": 1, "conditions": [{
        "type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]}});
    let merge = Patch::Merge(&patch);
    revisions.patch_status("a-00001", &PatchParams::default(), &merge).await.unwrap();
}

async fn check_settings_apply_at_once(client: &Client, namespace: &str, leader: &WebhookReplica) {
    let services = dynamic_api(client, namespace, "serving.knative.dev", "v1", "Service");
    let mut settings = AdmissionSettings::default();
    Arc::make_mut(&mut settings.defaults).timeout_seconds = 17;
    leader.settings.send_replace(Arc::new(settings));
    let object = service("settings", template(json!({"image": "a"})));
    let created = services.create(&PostParams::default(), &object).await.unwrap();
    assert_eq!(created.data["spec"]["template"]["spec"]["timeoutSeconds"], 17);
}

async fn check_config_maps(client: &Client, namespace: &str) {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let map = |name: &str, label: &str, value: &str| -> ConfigMap {
        serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {"app.kubernetes.io/name": label}},
            "data": {"revision-timeout-seconds": value},
        }))
        .unwrap()
    };
    let create = PostParams::default();
    let refused = maps.create(&create, &map("config-defaults", "rouse", "x")).await;
    let Err(kube::Error::Api(status)) = refused else { panic!("{refused:?}") };
    let expected = "admission webhook \"config.webhook.serving.knative.dev\" denied the request: validation failed: ";
    assert!(status.message.starts_with(expected), "{}", status.message);
    maps.create(&create, &map("config-defaults", "rouse", "100")).await.unwrap();
    // A ConfigMap of another application: the selector by label leaves it out.
    maps.create(&create, &map("other", "somebody", "x")).await.unwrap();
}

async fn check_certificate_rotation(client: &Client, namespace: &str, leader: &WebhookReplica) {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    // Read before the renewal becomes due, which changes it.
    let before = leader.certificates.bundle().unwrap();
    let due = json!({"stringData": {"renew-after": "0"}});
    secrets.patch("webhook-certs", &PatchParams::default(), &Patch::Merge(&due)).await.unwrap();
    let services = dynamic_api(client, namespace, "serving.knative.dev", "v1", "Service");
    let renewed = async {
        let mut number = 0;
        // Requests all the time: no TLS handshake may fail during the rotation.
        while leader.certificates.bundle().as_ref() == Some(&before) {
            number += 1;
            let object = service(&format!("r-{number}"), template(json!({"image": "a"})));
            services.create(&PostParams::default(), &object).await.unwrap();
            sleep(Duration::from_millis(200)).await;
        }
    };
    timeout(Duration::from_secs(60), renewed).await.expect("renewed");
    let after = leader.certificates.bundle().unwrap();
    assert_eq!(after.authority, before.authority, "a renewed certificate keeps its authority");
    let object = service("renewed", template(json!({"image": "a"})));
    services.create(&PostParams::default(), &object).await.unwrap();
}
