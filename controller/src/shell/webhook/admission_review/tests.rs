use super::*;

fn send_review(hook: AdmissionHook, request: Value) -> Value {
    let body =
        json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request});
    let response =
        respond_to_review(hook, body.to_string().as_bytes(), &AdmissionSettings::default())
            .expect("a response");
    serde_json::from_slice(&response).expect("JSON")
}

fn service(image: &str) -> Value {
    json!({
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": {"name": "a", "namespace": "n"},
        "spec": {"template": {"spec": {"containers": [{"image": image}]}}},
    })
}

fn request(object: &Value) -> Value {
    json!({
        "uid": "u",
        "kind": {"group": "serving.knative.dev", "version": "v1", "kind": "Service"},
        "operation": "CREATE",
        "userInfo": {"username": "ann"},
        "object": object,
        "oldObject": null,
        "options": {"kind": "CreateOptions"},
    })
}

fn patch(response: &Value) -> Vec<Value> {
    let bytes: ByteString =
        serde_json::from_value(response["response"]["patch"].clone()).expect("a patch");
    serde_json::from_slice(&bytes.0).expect("JSON")
}

#[test]
fn defaulting_is_answered_by_the_smallest_patch() {
    let response = send_review(AdmissionHook::Defaulting, request(&service("a")));
    assert_eq!(response["kind"], "AdmissionReview");
    assert_eq!(response["response"]["uid"], "u");
    assert_eq!(response["response"]["allowed"], true);
    assert_eq!(response["response"]["patchType"], "JSONPatch");
    let mut paths: Vec<_> = patch(&response)
        .iter()
        .map(|it| {
            assert_eq!(it["op"], "add", "{it}");
            it["path"].as_str().expect("a path").to_owned()
        })
        .collect();
    paths.sort();
    let spec = "/spec/template/spec";
    let expected = [
        "/metadata/annotations".to_owned(),
        format!("{spec}/containerConcurrency"),
        format!("{spec}/containers/0/name"),
        format!("{spec}/containers/0/readinessProbe"),
        format!("{spec}/enableServiceLinks"),
        format!("{spec}/timeoutSeconds"),
        "/spec/traffic".to_owned(),
    ];
    assert_eq!(paths, expected);
}

#[test]
fn an_object_with_all_defaults_gets_no_patch() {
    let filled = {
        let mut object = service("a");
        let response = send_review(AdmissionHook::Defaulting, request(&object));
        let patch: json_patch::Patch =
            serde_json::from_value(patch(&response).into()).expect("a patch");
        json_patch::patch(&mut object, &patch).expect("applies");
        object
    };
    let response = send_review(AdmissionHook::Defaulting, request(&filled));
    assert_eq!(response["response"], json!({"uid": "u", "allowed": true}));
}

#[test]
fn a_refusal_is_a_status_in_knatives_words() {
    let response = send_review(AdmissionHook::Validation, request(&service("")));
    let response = &response["response"];
    assert_eq!(response["allowed"], false);
    let message = response["status"]["message"].as_str().expect("a message");
    assert!(message.starts_with("validation failed: "), "{message}");
    assert!(
        message.contains("missing field(s): spec.template.spec.containers[0].image"),
        "{message}"
    );
    assert_eq!(response["status"]["code"], 400);
    assert_eq!(response["status"]["reason"], "BadRequest");
}

#[test]
fn unknown_fields_are_handled_by_the_clients_field_validation() {
    let mut object = service("a");
    object["spec"]["template"]["spec"]["containers"][0]["imagge"] = "b".into();
    let with = |field_validation: Option<&str>| {
        let mut request = request(&object);
        if let Some(field_validation) = field_validation {
            request["options"]["fieldValidation"] = field_validation.into();
        }
        send_review(AdmissionHook::Defaulting, request)["response"].clone()
    };
    let warning = "unknown field \"spec.template.spec.containers[0].imagge\"";
    for field_validation in [None, Some("Warn")] {
        let response = with(field_validation);
        assert_eq!(response["allowed"], true);
        assert_eq!(response["warnings"], json!([warning]));
    }
    assert_eq!(with(Some("Ignore"))["warnings"], Value::Null);
    let strict = with(Some("Strict"));
    assert_eq!(strict["allowed"], false);
    assert_eq!(strict["status"]["message"], format!("strict decoding error: {warning}"));
}

#[test]
fn a_warning_is_one_line() {
    // Several fields of `securityContext` are unset and have the same warning: one line names all of them.
    let (filled, _) = admission::apply_defaults(&AdmissionRequest {
        kind: AdmittedKind::Service,
        object: &service("a"),
        old: None,
        user: None,
        settings: AdmissionSettings::default().rule_settings(),
    });
    let response = send_review(AdmissionHook::Validation, request(&filled));
    assert_eq!(response["response"]["allowed"], true);
    let warnings = response["response"]["warnings"].as_array().expect("warnings").clone();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(!warnings[0].as_str().expect("text").contains('\n'));
}

#[test]
fn requests_outside_the_rules_are_admitted() {
    let invalid = service("");
    for (key, value) in [("operation", json!("DELETE")), ("subResource", json!("status"))] {
        let mut request = request(&invalid);
        request[key] = value;
        assert_eq!(
            send_review(AdmissionHook::Validation, request)["response"]["allowed"],
            true,
            "{key}"
        );
    }
    let mut terminating = invalid;
    terminating["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    assert_eq!(
        send_review(AdmissionHook::Validation, request(&terminating))["response"]["allowed"],
        true
    );
}

#[test]
fn a_body_that_is_no_review_is_refused() {
    for body in ["", "[]", "{}", "{\"request\": 1}", "nonsense"] {
        assert!(
            respond_to_review(
                AdmissionHook::Validation,
                body.as_bytes(),
                &AdmissionSettings::default()
            )
            .is_err(),
            "{body}"
        );
    }
}

#[test]
fn an_object_of_an_unknown_kind_is_refused() {
    let mut foreign = request(&service("a"));
    foreign["kind"]["kind"] = "Cat".into();
    let response = send_review(AdmissionHook::Validation, foreign)["response"].clone();
    assert_eq!(response["status"]["message"], "unhandled kind: serving.knative.dev/Cat");
}

#[test]
fn config_maps_are_validated_before_they_apply() {
    let map = |data: Value, annotations: Value| {
        let object = json!({
            "metadata": {"name": "config-defaults", "annotations": annotations},
            "data": data,
        });
        send_review(AdmissionHook::Config, request(&object))["response"].clone()
    };
    let valid = map(json!({"revision-timeout-seconds": "100"}), json!({}));
    assert_eq!(valid["allowed"], true);
    let invalid = map(json!({"revision-timeout-seconds": "601"}), json!({}));
    let expected = "validation failed: revision-timeout-seconds (601) cannot be greater than max-revision-timeout-seconds (600)";
    assert_eq!(invalid["status"]["message"], expected);
    let edited =
        map(json!({"_example": "a: b"}), json!({"knative.dev/example-checksum": "00000000"}));
    let message = edited["status"]["message"].as_str().expect("a message");
    assert!(
        message.starts_with("validation failed: the update modifies a key in \"_example\""),
        "{message}"
    );
}

#[test]
fn a_new_pod_gets_the_node_or_the_affinity_of_its_placement() {
    let affinity = json!({"nodeAffinity": {}});
    for (placement, expected) in [
        (PodPlacement::Node("n1".into()), json!({"path": "/spec/nodeName", "value": "n1"})),
        (
            PodPlacement::Affinity(affinity.clone()),
            json!({"path": "/spec/affinity", "value": affinity}),
        ),
    ] {
        let review = |operation: &str| {
            let mut request = request(&json!({"kind": "Pod"}));
            request["operation"] = operation.into();
            let body = json!({"request": request}).to_string();
            let place = |_: &Value, _| Some(placement.clone());
            let response = BindingReview::decode(body.as_bytes()).expect("a review").respond(place);
            let response = response.expect("a response");
            serde_json::from_slice::<Value>(&response).expect("JSON")
        };
        let changes = patch(&review("CREATE"));
        let [change] = changes.as_slice() else { panic!("{changes:?}") };
        assert_eq!(change["op"], "add");
        assert_eq!((&change["path"], &change["value"]), (&expected["path"], &expected["value"]));
        assert_eq!(review("UPDATE")["response"].get("patch"), None);
    }
}
