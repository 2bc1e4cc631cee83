//! Pure: contents of `deploy/` and `docs/rbac.md`, generated from the objects that `rouse install` applies.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{
    objects, rbac,
    settings::{GatewayExposure, InstallProfile, InstallSettings},
};

/// First line of each generated file.
const GENERATED_HEADER: &str =
    "# Written by `cargo xtask manifests` from rouse/src/install; changes here are lost.\n";

/// Settings that the chart leaves to its user: the placeholder in generated objects, and the expression in the chart.
const CHART_PLACEHOLDERS: [(&str, &str); 4] = [
    ("the-namespace", ".Release.Namespace"),
    ("the-image", ".Values.image"),
    ("the-domain", ".Values.domain"),
    ("the-cluster-domain", ".Values.clusterDomain"),
];

/// Contents of all generated files, by path relative to the repository.
pub(crate) fn all() -> Result<Vec<(&'static str, String)>, anyhow::Error> {
    let settings = InstallSettings::default();
    // CRDs are a file of their own: Helm installs them from `crds/`, before the templates.
    let (crds, rest): (Vec<Value>, Vec<Value>) =
        objects::all(&settings).into_iter().partition(is_crd);
    let crds = GENERATED_HEADER.to_owned() + &objects::to_yaml(&crds)?;
    Ok(vec![
        ("deploy/kustomization.yaml", kustomization()),
        ("deploy/crds.yaml", crds.clone()),
        ("deploy/rouse.yaml", GENERATED_HEADER.to_owned() + &objects::to_yaml(&rest)?),
        ("deploy/helm/Chart.yaml", chart()),
        ("deploy/helm/values.yaml", values_yaml(&settings)),
        ("deploy/helm/values.schema.json", values_schema()?),
        ("deploy/helm/crds/crds.yaml", crds),
        ("deploy/helm/templates/rouse.yaml", GENERATED_HEADER.to_owned() + &chart_template()?),
        ("docs/rbac.md", rbac::rbac_markdown()),
    ])
}

fn is_crd(object: &Value) -> bool {
    object["kind"] == "CustomResourceDefinition"
}

fn kustomization() -> String {
    format!(
        "{GENERATED_HEADER}apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n- crds.yaml\n- rouse.yaml\n"
    )
}

fn chart() -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "{GENERATED_HEADER}apiVersion: v2\nname: rouse\ndescription: Services that sleep at zero pods and wake on the next request\n\
         type: application\nversion: {version}\nappVersion: {version}\nkubeVersion: \">=1.30.0-0\"\n"
    )
}

fn values_yaml(settings: &InstallSettings) -> String {
    format!(
        "{GENERATED_HEADER}# Image with all components.\nimage: {}\n\
         # How requests from outside reach the gateway: loadbalancer, nodeport or hostport.\ngateway: loadbalancer\n\
         # standard, or fast: no account token in pods whose service names no account.\n\
         # fast also binds pods without the scheduler: bind-pods in config-deployment.\nprofile: standard\n\
         # Domain of URLs from outside.\ndomain: {}\n# The cluster's own domain.\nclusterDomain: {}\n",
        settings.image, settings.domain, settings.cluster_domain
    )
}

/// JSON schema of the chart's values, which are the flags of `rouse install`. Without it a misspelt value would
/// silently count as the default.
fn values_schema() -> Result<String, serde_json::Error> {
    let label = "[a-z0-9]([-a-z0-9]*[a-z0-9])?";
    let domain = json!({
        "type": "string", "maxLength": 253, "pattern": format!("^{label}(\\.{label})*$"),
    });
    let schema = json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": GENERATED_HEADER.trim_start_matches('#').trim(),
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "image": {"type": "string", "minLength": 1},
            "gateway": {"enum": ["loadbalancer", "nodeport", "hostport"]},
            "profile": {"enum": ["standard", "fast"]},
            "domain": domain,
            "clusterDomain": domain,
            // Helm itself sets this value where the chart is a dependency of another.
            "global": {"type": "object"},
        },
    });
    Ok(serde_json::to_string_pretty(&schema)? + "\n")
}

/// Generates the chart's only template. Helm creates the namespace, and reads the CRDs from a folder of their own.
fn chart_template() -> Result<String, serde_norway::Error> {
    let chart_objects = |gateway, profile| {
        let [namespace, image, domain, cluster_domain] =
            CHART_PLACEHOLDERS.map(|(placeholder, _)| placeholder.to_owned());
        let settings = InstallSettings {
            namespace,
            image,
            domain,
            cluster_domain,
            gateway,
            profile,
            // An operator with a proxy before the gateway sets it in `config-network`.
            ..InstallSettings::default()
        };
        let objects = objects::all(&settings).into_iter();
        objects.filter(|it| !is_crd(it) && it["kind"] != "Namespace").collect::<Vec<_>>()
    };
    // Each choice changes objects in place, so objects of the same index are compared.
    let defaults = chart_objects(GatewayExposure::Loadbalancer, InstallProfile::Standard);
    let others = [
        ("gateway", "nodeport", chart_objects(GatewayExposure::Nodeport, InstallProfile::Standard)),
        ("gateway", "hostport", chart_objects(GatewayExposure::Hostport, InstallProfile::Standard)),
        ("profile", "fast", chart_objects(GatewayExposure::Loadbalancer, InstallProfile::Fast)),
    ];
    let mut text = String::new();
    for (index, object) in defaults.iter().enumerate() {
        // An object that depends on a choice is written once for each value.
        let mut word = "if";
        for (name, choice, objects) in &others {
            let Some(other) = objects.get(index).filter(|other| *other != object) else { continue };
            let _ = writeln!(text, "{{{{- {word} eq .Values.{name} {choice:?} }}}}");
            text.push_str(&template_document(other)?);
            word = "else if";
        }
        if word == "if" {
            text.push_str(&template_document(object)?);
        } else {
            text.push_str("{{- else }}\n");
            text.push_str(&template_document(object)?);
            text.push_str("{{- end }}\n");
        }
    }
    Ok(text)
}

/// Formats one object as a template of Helm.
fn template_document(object: &Value) -> Result<String, serde_norway::Error> {
    let text = objects::to_yaml(std::slice::from_ref(object))?;
    // Braces in the object itself (name templates of config-network) must not be evaluated by Helm.
    let mut text = text.replace("{{", "\u{1}").replace('\u{1}', "{{ \"{{\" }}");
    for (placeholder, value) in CHART_PLACEHOLDERS {
        // A value that is the whole text is quoted: a namespace called 42 would otherwise be a number.
        let quoted = format!("{{{{ {value} | quote }}}}");
        text = text.replace(&format!(": {placeholder}\n"), &format!(": {quoted}\n"));
        text = text.replace(&format!(" {placeholder}: "), &format!(" {quoted}: "));
        text = text.replace(placeholder, &format!("{{{{ {value} }}}}"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    #[test]
    fn generated_files_in_the_tree_are_up_to_date() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace");
        for (path, text) in all().expect("objects are YAML") {
            let current = fs::read_to_string(root.join(path)).unwrap_or_default();
            assert!(current == text, "{path} is out of date: run `cargo xtask manifests`");
        }
    }

    #[test]
    fn the_chart_holds_the_same_objects() {
        let mut text = chart_template().expect("objects are YAML");
        for line in ["{{- else }}\n", "{{- end }}\n"] {
            text = text.replace(line, "");
        }
        let lines = text.lines().filter(|line| !line.contains(" eq .Values."));
        let mut text = lines.collect::<Vec<_>>().join("\n");
        let settings = InstallSettings::default();
        let values =
            [&settings.namespace, &settings.image, &settings.domain, &settings.cluster_domain];
        for ((_, placeholder), value) in CHART_PLACEHOLDERS.iter().zip(values) {
            text = text.replace(&format!("{{{{ {placeholder} | quote }}}}"), value);
            text = text.replace(&format!("{{{{ {placeholder} }}}}"), value);
        }
        text = text.replace("{{ \"{{\" }}", "{{");
        let documents = text.split("---\n").filter(|it| it.contains("kind:"));
        let objects: Vec<Value> = documents
            .map(|it| serde_norway::from_str(it).unwrap_or_else(|error| panic!("{error}\n{it}")))
            .collect();
        for object in objects::all(&settings) {
            let elsewhere = is_crd(&object) || object["kind"] == "Namespace";
            assert!(
                elsewhere || objects.contains(&object),
                "{} differs",
                objects::kind_and_name(&object)
            );
        }
        let twice = objects.iter().filter(|it| it["metadata"]["name"] == "rouse-gateway").count();
        assert_eq!(twice, 3, "one for each way of exposure");
    }
}
