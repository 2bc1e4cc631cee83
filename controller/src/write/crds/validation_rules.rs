//! Pure: defaults and validation rules in the schemas, with Knative's messages.
//!
//! Only rules that no ConfigMap can change are here; the webhooks check the rest. They also check what a schema cannot
//! report with the value at fault, such as the sum of percentages. An expression that formats a number costs more than
//! the API server permits, and its refusal would precede the webhook's better one. Lists with rules need a maximum
//! length, from which the API server estimates the cost of the rules.

use serde_json::{Value, json};

/// Greatest number of traffic targets of a Route. Knative has no bound; no practical Route is longer.
const MAX_TRAFFIC_TARGETS: u32 = 1000;

/// Greatest length of a qualified name: a prefix of 253 characters, a slash and a name of 63.
const MAX_QUALIFIED_NAME: u32 = 253 + 1 + 63;

/// Adds rules and defaults to the schema of a whole object.
pub(super) fn add_rules(kind: &str, root: &mut Value) {
    match kind {
        "Service" => {
            add_traffic_rules(root, TrafficOwner::Service);
            add_name_prefix_rule(root);
            add_protocol_default(root, "/properties/spec/properties/template/properties/spec");
        }
        "Configuration" => {
            add_name_prefix_rule(root);
            add_protocol_default(root, "/properties/spec/properties/template/properties/spec");
        }
        "Route" => add_traffic_rules(root, TrafficOwner::Route),
        "Revision" => add_protocol_default(root, "/properties/spec"),
        "DomainMapping" => {
            require_fields(root, "/properties/spec/properties/ref", &["kind", "name"])
        }
        "ServerlessService" => require_fields(root, "/properties/spec", &["mode", "objectRef"]),
        "ClusterDomainClaim" => require_fields(root, "/properties/spec", &["namespace"]),
        "Certificate" => require_fields(root, "/properties/spec", &["dnsNames", "secretName"]),
        "Image" => require_fields(root, "/properties/spec", &["image"]),
        "PodAutoscaler" => require_fields(root, "/properties/spec", &["scaleTargetRef"]),
        _ => {}
    }
    // Fields are required only within a `spec` that exists.
    if matches!(kind, "DomainMapping" | "ClusterDomainClaim" | "Image") {
        require_fields(root, "", &["spec"]);
    }
}

/// Kind that has traffic targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TrafficOwner {
    /// A Service has a Configuration of its own, so its targets may not name one.
    Service,
    /// A target of a Route names a Revision or a Configuration.
    Route,
}

/// Adds the rules of traffic targets.
fn add_traffic_rules(root: &mut Value, owner: TrafficOwner) {
    let Some(list) = root.pointer_mut("/properties/spec/properties/traffic") else { return };
    // The cost of the rules below is estimated from this length and the lengths of the texts.
    list["maxItems"] = MAX_TRAFFIC_TARGETS.into();
    let items = &mut list["items"];
    let mut rules = vec![
        json!({
            "rule": "!has(self.latestRevision) || self.latestRevision == (!has(self.revisionName) || self.revisionName == '')",
            "message": "may not set revisionName when latestRevision is true, and must when it is false",
            "fieldPath": ".latestRevision",
        }),
        json!({
            "rule": "!has(self.url) || self.url == ''",
            "message": "must not set the field(s)",
            "fieldPath": ".url",
        }),
    ];
    rules.push(match owner {
        TrafficOwner::Route => json!({
            "rule": "!(has(self.revisionName) && self.revisionName != '' && has(self.configurationName) && self.configurationName != '')",
            "message": "expected exactly one, got both",
            "fieldPath": ".revisionName",
        }),
        TrafficOwner::Service => json!({
            "rule": "!has(self.configurationName) || self.configurationName == ''",
            "message": "must not set the field(s)",
            "fieldPath": ".configurationName",
        }),
    });
    items["x-kubernetes-validations"] = rules.into();
    // The rules ask with `has` if a field is absent, and must not meet `null`.
    for name in ["url", "revisionName", "configurationName", "latestRevision", "percent", "tag"] {
        if let Some(field) = items["properties"][name].as_object_mut() {
            field.remove("nullable");
        }
    }
    let fields = &mut items["properties"];
    for name in ["revisionName", "configurationName", "tag"] {
        fields[name]["maxLength"] = MAX_QUALIFIED_NAME.into();
    }
    fields["url"]["maxLength"] = 2048.into();
    fields["percent"]["x-kubernetes-validations"] = json!([{
        "rule": "self >= 0 && self <= 100",
        "message": "expected 0 <= percent <= 100",
    }]);
}

/// Adds the rule that a template's own name begins with the object's name.
fn add_name_prefix_rule(root: &mut Value) {
    let at = "/properties/spec/properties/template/properties/metadata";
    let Some(metadata) = root.pointer_mut(at) else { return };
    // A rule can read only fields that the schema lists, and users may write others as well.
    metadata["x-kubernetes-preserve-unknown-fields"] = true.into();
    if let Some(name) = metadata["properties"]["name"].as_object_mut() {
        name.remove("nullable");
        name.insert("maxLength".into(), 253.into());
    }
    let name = "self.spec.template.metadata.name";
    let has_name = "has(self.spec) && has(self.spec.template) && has(self.spec.template.metadata) && has(self.spec.template.metadata.name)";
    root["x-kubernetes-validations"] = json!([{
        "rule": format!("!({has_name}) || {name} == '' || {name}.startsWith(self.metadata.name + '-')"),
        "message": "must have the object's name and a dash as its prefix",
        "messageExpression": format!("'\"' + {name} + '\" must have prefix \"' + self.metadata.name + '-\"'"),
        "fieldPath": ".spec.template.metadata.name",
    }]);
}

/// Adds Kubernetes' default protocol, without which tools would always show a difference to the Deployment.
fn add_protocol_default(root: &mut Value, pod: &str) {
    for list in ["containers", "initContainers"] {
        let at =
            format!("{pod}/properties/{list}/items/properties/ports/items/properties/protocol");
        if let Some(protocol) = root.pointer_mut(&at) {
            protocol["default"] = "TCP".into();
        }
    }
}

/// Marks fields of the object at a JSON pointer as required.
fn require_fields(root: &mut Value, at: &str, names: &[&str]) {
    if let Some(Value::Object(schema)) = root.pointer_mut(at) {
        schema.insert("required".into(), json!(names));
    }
}
