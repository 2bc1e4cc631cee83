//! Properties of admission that hold for any document.

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn kinds() -> impl Strategy<Value = AdmittedKind> {
    prop::sample::select(vec![
        AdmittedKind::Service,
        AdmittedKind::Configuration,
        AdmittedKind::Revision,
        AdmittedKind::Route,
        AdmittedKind::DomainMapping,
        AdmittedKind::PodAutoscaler,
        AdmittedKind::Metric,
        AdmittedKind::ServerlessService,
        AdmittedKind::ClusterDomainClaim,
    ])
}

/// Keys with a meaning somewhere, so that random documents reach the rules.
const KEYS: [&str; 40] = [
    "metadata",
    "name",
    "generateName",
    "annotations",
    "labels",
    "spec",
    "template",
    "traffic",
    "containers",
    "initContainers",
    "volumes",
    "image",
    "ports",
    "containerPort",
    "readinessProbe",
    "httpGet",
    "tcpSocket",
    "port",
    "volumeMounts",
    "mountPath",
    "emptyDir",
    "secret",
    "items",
    "securityContext",
    "capabilities",
    "drop",
    "percent",
    "tag",
    "revisionName",
    "ref",
    "namespace",
    "timeoutSeconds",
    "containerConcurrency",
    "periodSeconds",
    "resources",
    "limits",
    "env",
    "projected",
    "sources",
    "autoscaling.knative.dev/window",
];

fn documents() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-2_i64..200).prop_map(Value::from),
        "[a-zA-Z0-9/.:_-]{0,12}".prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(8, 64, 6, |inner| {
        let key = prop::sample::select(KEYS.to_vec());
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(key, inner, 0..6).prop_map(|all| all
                .into_iter()
                .map(|(key, it)| (key.to_owned(), it))
                .collect::<Map<_, _>>()
                .into()),
        ]
    })
}

/// Generates Services that are mostly valid: their fields are varied one by one.
fn services() -> impl Strategy<Value = Value> {
    let probe = prop_oneof![
        Just(Value::Null),
        Just(json!({})),
        Just(json!({"periodSeconds": 3})),
        Just(json!({"httpGet": {"path": "/"}, "successThreshold": 0})),
        Just(json!({"grpc": {"port": 8080}})),
    ];
    let container =
        ("[a-c]{0,2}", probe, any::<bool>(), 0_u16..3).prop_map(|(name, probe, ports, mount)| {
            let mut it = json!({"image": "a", "readinessProbe": probe});
            if !name.is_empty() {
                it["name"] = name.into();
            }
            if ports {
                it["ports"] = json!([{"containerPort": 81}]);
            }
            if mount > 0 {
                it["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
            }
            it
        });
    let volume = prop_oneof![
        Just(json!([])),
        Just(json!([{"name": "v", "emptyDir": {}}])),
        Just(json!([{"name": "v", "secret": {"secretName": "s"}}])),
    ];
    let timeout = prop_oneof![Just(Value::Null), (0_i64..650).prop_map(Value::from)];
    (prop::collection::vec(container, 1..3), volume, timeout, any::<bool>()).prop_map(
        |(containers, volumes, timeout, named)| {
            let mut object = json!({
                "metadata": {"name": "a", "namespace": "n"},
                "spec": {"template": {"spec": {
                    "containers": containers, "volumes": volumes, "timeoutSeconds": timeout,
                }}},
            });
            if named {
                object["spec"]["template"]["metadata"] = json!({"name": "a-1"});
            }
            object
        },
    )
}

proptest! {
    /// Admission answers any document without a panic.
    #[test]
    fn no_document_stops_admission(kind in kinds(), object in documents(), old in documents(), update: bool) {
        let old = update.then_some(&old);
        let request = AdmissionRequest { old, user: Some("ann"), ..create_request(kind, &object, &FEATURES) };
        let (filled, _) = apply_defaults(&request);
        let _ = validate(&AdmissionRequest { object: &filled, ..request });
    }

    /// Defaulting is idempotent, since the API server may call again after another webhook.
    #[test]
    fn defaulting_twice_changes_nothing(kind in kinds(), object in prop_oneof![documents(), services()]) {
        let (once, _) = apply_defaults(&create_request(kind, &object, &FEATURES));
        let (twice, unknown) = apply_defaults(&create_request(kind, &once, &FEATURES));
        prop_assert_eq!(&once, &twice);
        prop_assert_eq!(unknown, Vec::<String>::new());
    }

    /// An admitted object is admitted again without a change, and is not changed.
    #[test]
    fn an_admitted_object_stays_admitted(object in services()) {
        let (filled, _) = apply_defaults(&create_request(AdmittedKind::Service, &object, &FEATURES));
        prop_assume!(validate(&create_request(AdmittedKind::Service, &filled, &FEATURES)).problems.is_empty());
        let request = AdmissionRequest {
            old: Some(&filled),
            user: Some("bob"),
            ..create_request(AdmittedKind::Service, &filled, &FEATURES)
        };
        let (after, _) = apply_defaults(&request);
        prop_assert_eq!(&after, &filled);
        prop_assert_eq!(validate(&AdmissionRequest { object: &after, ..request }).problems, vec![]);
    }
}
