//! Pure: what the schemas themselves fill in and refuse, in Knative's words.
//!
//! Only what no ConfigMap can change stands here; the webhooks say the rest. So do they where a schema could judge but
//! not name the value at fault, such as the sum of percentages: an expression that writes a number costs more than the
//! API server grants, and its refusal would come before the webhook's better one. Lists with rules need a bound of
//! their length, or the API server could not know what the rules cost.

use serde_json::{Value, json};

/// Targets a Route may have. Knative has no bound; a list of this length is past use.
const TARGETS: u32 = 1000;

/// Adds them to the schema of a whole object.
pub(super) fn add(kind: &str, root: &mut Value) {
    match kind {
        "Service" => {
            traffic(root, false);
            name_prefix(root);
            ports(root, "/properties/spec/properties/template/properties/spec");
        }
        "Configuration" => {
            name_prefix(root);
            ports(root, "/properties/spec/properties/template/properties/spec");
        }
        "Route" => traffic(root, true),
        "Revision" => ports(root, "/properties/spec"),
        "DomainMapping" => require(root, "/properties/spec/properties/ref", &["kind", "name"]),
        "ServerlessService" => require(root, "/properties/spec", &["mode", "objectRef"]),
        "ClusterDomainClaim" => require(root, "/properties/spec", &["namespace"]),
        "Image" => require(root, "/properties/spec", &["image"]),
        "PodAutoscaler" => require(root, "/properties/spec", &["scaleTargetRef"]),
        _ => {}
    }
    if matches!(kind, "DomainMapping" | "ClusterDomainClaim" | "Image") {
        require(root, "", &["spec"]);
    }
}

fn traffic(root: &mut Value, configurations: bool) {
    let Some(list) = root.pointer_mut("/properties/spec/properties/traffic") else { return };
    list["maxItems"] = TARGETS.into();
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
    if configurations {
        rules.push(json!({
            "rule": "!(has(self.revisionName) && self.revisionName != '' && has(self.configurationName) && self.configurationName != '')",
            "message": "expected exactly one, got both",
            "fieldPath": ".revisionName",
        }));
    } else {
        rules.push(json!({
            "rule": "!has(self.configurationName) || self.configurationName == ''",
            "message": "must not set the field(s)",
            "fieldPath": ".configurationName",
        }));
    }
    items["x-kubernetes-validations"] = rules.into();
    // No field of these is null to a rule: an absent one is what `has` asks about.
    for name in ["url", "revisionName", "configurationName", "latestRevision", "percent", "tag"] {
        if let Some(field) = items["properties"][name].as_object_mut() {
            field.remove("nullable");
        }
    }
    let fields = &mut items["properties"];
    for name in ["revisionName", "configurationName", "tag"] {
        fields[name]["maxLength"] = 317.into();
    }
    fields["url"]["maxLength"] = 2048.into();
    fields["percent"]["x-kubernetes-validations"] = json!([{
        "rule": "self >= 0 && self <= 100",
        "message": "expected 0 <= percent <= 100",
    }]);
}

/// A template's own name begins with its object's.
fn name_prefix(root: &mut Value) {
    let at = "/properties/spec/properties/template/properties/metadata";
    let Some(metadata) = root.pointer_mut(at) else { return };
    metadata["x-kubernetes-preserve-unknown-fields"] = true.into();
    if let Some(name) = metadata["properties"]["name"].as_object_mut() {
        name.remove("nullable");
        name.insert("maxLength".into(), 253.into());
    }
    let name = "self.spec.template.metadata.name";
    let said = "has(self.spec) && has(self.spec.template) && has(self.spec.template.metadata) && has(self.spec.template.metadata.name)";
    root["x-kubernetes-validations"] = json!([{
        "rule": format!("!({said}) || {name} == '' || {name}.startsWith(self.metadata.name + '-')"),
        "message": "must have the object's name and a dash as its prefix",
        "messageExpression": format!("'\"' + {name} + '\" must have prefix \"' + self.metadata.name + '-\"'"),
        "fieldPath": ".spec.template.metadata.name",
    }]);
}

/// Kubernetes' own default, which its Deployments would show as a difference for ever.
fn ports(root: &mut Value, pod: &str) {
    for list in ["containers", "initContainers"] {
        let at =
            format!("{pod}/properties/{list}/items/properties/ports/items/properties/protocol");
        if let Some(protocol) = root.pointer_mut(&at) {
            protocol["default"] = "TCP".into();
        }
    }
}

fn require(root: &mut Value, at: &str, names: &[&str]) {
    if let Some(Value::Object(schema)) = root.pointer_mut(at) {
        schema.insert("required".into(), json!(names));
    }
}
