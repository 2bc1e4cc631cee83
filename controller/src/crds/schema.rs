//! Pure: from the schema that a type has to one that Kubernetes takes ("structural").
//!
//! References are resolved, `null` becomes `nullable`, and what a structural schema may not hold is left out. Where a
//! PodSpec begins, fields are cut to [the ones that users may write](crate::parse::mask). What lies outside is kept by
//! the API server nevertheless (`x-kubernetes-preserve-unknown-fields`), so that the webhook sees it and says in
//! Knative's words that it may not be set, instead of its vanishing without a word.

use schemars::{JsonSchema, generate::SchemaSettings};
use serde_json::{Map, Value, json};

use crate::parse::mask::{Field, Mask, POD};

const KEPT: [&str; 11] = [
    "description",
    "type",
    "format",
    "enum",
    "minimum",
    "maximum",
    "nullable",
    "pattern",
    "required",
    "x-kubernetes-int-or-string",
    "x-kubernetes-preserve-unknown-fields",
];
const PRESERVE: &str = "x-kubernetes-preserve-unknown-fields";
/// What Kubernetes takes for a quantity (apimachinery `api/resource`).
const QUANTITY: &str = r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$";

type Object = Map<String, Value>;

/// The schema of `T`.
pub(super) fn of<T: JsonSchema>() -> Value {
    let generator = SchemaSettings::draft2020_12().into_generator();
    let root = Value::from(generator.into_root_schema_for::<T>());
    let defs = root.get("$defs").and_then(Value::as_object).cloned().unwrap_or_default();
    Resolver { defs }.node(&root, Within::Ours)
}

/// Where in an object a schema stands.
#[derive(Clone, Copy)]
enum Within {
    /// In a type of ours.
    Ours,
    /// In a PodSpec, with what users may write there; none: everything.
    Pod(Option<&'static Mask>),
}

struct Resolver {
    defs: Object,
}

impl Resolver {
    fn node(&self, schema: &Value, within: Within) -> Value {
        let Some(mut it) = self.resolve(schema) else {
            // `true`: anything at all.
            return json!({PRESERVE: true});
        };
        if it.remove("quantity").is_some() {
            return quantity(it.get("description"));
        }
        let mut out = Object::new();
        nullable(&mut it);
        for key in KEPT {
            if let Some(value) = it.get(key) {
                out.insert(key.into(), value.clone());
            }
        }
        number(&mut out);
        if let Some(items) = it.get("items") {
            out.insert("items".into(), self.node(items, within));
        }
        match it.get("additionalProperties") {
            Some(more @ Value::Object(_)) => {
                out.insert("additionalProperties".into(), self.node(more, within));
            }
            _ => self.properties(&it, &mut out, within),
        }
        Value::Object(out)
    }

    fn properties(&self, it: &Object, out: &mut Object, within: Within) {
        let Some(Value::Object(all)) = it.get("properties") else { return };
        let is_pod = all.contains_key("containers") && all.contains_key("restartPolicy");
        let mut properties = Object::new();
        for (name, schema) in all {
            let field = match within {
                Within::Ours if !is_pod => Some(self.node(schema, Within::Ours)),
                Within::Ours => match POD.field(name) {
                    Some(field) => Some(self.field(schema, field)),
                    // A limit of ours beside the pod's fields.
                    None => is_limit(name).then(|| self.node(schema, Within::Ours)),
                },
                Within::Pod(None) => Some(self.node(schema, within)),
                Within::Pod(Some(mask)) => mask.field(name).map(|field| self.field(schema, field)),
            };
            properties.extend(field.map(|field| (name.clone(), field)));
        }
        out.insert("properties".into(), Value::Object(properties));
        if is_pod || matches!(within, Within::Pod(_)) {
            out.insert(PRESERVE.into(), true.into());
            // What is missing the webhook says, in Knative's words.
            out.remove("required");
        }
    }

    /// One field of a pod.
    fn field(&self, schema: &Value, field: Field) -> Value {
        match field {
            Field::Any => self.node(schema, Within::Pod(None)),
            Field::In(mask) => self.node(schema, Within::Pod(Some(mask))),
            Field::If(feature) | Field::IfIn(feature, _) => self.guarded(schema, feature.key),
        }
    }

    /// A field behind a feature: whatever Kubernetes knows there, as Knative's schemas have it.
    fn guarded(&self, schema: &Value, feature: &str) -> Value {
        let about = format!("Needs the feature {feature} of config-features.");
        let it = self.resolve(schema).unwrap_or_default();
        match it.get("type").and_then(Value::as_str) {
            Some("array") => json!({
                "type": "array",
                "description": about,
                "items": {"type": "object", PRESERVE: true},
            }),
            Some("object") | None => {
                json!({"type": "object", "description": about, PRESERVE: true})
            }
            Some(scalar) => json!({"type": scalar, "description": about}),
        }
    }

    /// Puts what a reference names in its place; what stands beside it wins.
    fn resolve(&self, schema: &Value) -> Option<Object> {
        let mut it = schema.as_object()?.clone();
        for wrapper in ["allOf", "anyOf", "oneOf"] {
            let Some(Value::Array(all)) = it.remove(wrapper) else { continue };
            let is_null = |it: &Value| it.get("type").and_then(Value::as_str) == Some("null");
            let mut rest: Vec<&Value> = all.iter().filter(|one| !is_null(one)).collect();
            if rest.len() < all.len() {
                it.insert("nullable".into(), true.into());
            }
            if let [only] = rest[..] {
                self.beneath(&mut it, only);
            } else if rest.iter().all(|one| one.get("const").is_some() || one.get("enum").is_some())
            {
                variants(&mut it, &mut rest);
            }
        }
        if let Some(name) = it.remove("$ref") {
            let name = name.as_str().unwrap_or_default().trim_start_matches("#/$defs/").to_owned();
            if name.ends_with(".Quantity") {
                it.insert("quantity".into(), true.into());
            } else if let Some(definition) = self.defs.get(&name) {
                self.beneath(&mut it, definition);
            }
        }
        Some(it)
    }

    fn beneath(&self, it: &mut Object, other: &Value) {
        for (key, value) in self.resolve(other).unwrap_or_default() {
            it.entry(key).or_insert(value);
        }
    }
}

/// An enum whose variants have descriptions of their own.
fn variants(it: &mut Object, all: &mut Vec<&Value>) {
    let mut values = Vec::new();
    for one in all.drain(..) {
        values.extend(one.get("const").cloned());
        values.extend(one.get("enum").and_then(Value::as_array).into_iter().flatten().cloned());
    }
    it.insert("type".into(), "string".into());
    it.insert("enum".into(), values.into());
}

/// `[X, "null"]` as Kubernetes writes it.
fn nullable(it: &mut Object) {
    let Some(Value::Array(types)) = it.get("type") else { return };
    let kept: Vec<Value> = types.iter().filter(|one| *one != "null").cloned().collect();
    if kept.len() < types.len() {
        it.insert("nullable".into(), true.into());
    }
    if let [only] = &kept[..] {
        let only = only.clone();
        it.insert("type".into(), only);
    }
}

/// Kubernetes knows signed numbers of two sizes.
fn number(it: &mut Object) {
    let format = it.get("format").and_then(Value::as_str).unwrap_or_default();
    if !matches!(format, "" | "int32" | "int64" | "double" | "date-time" | "byte") {
        it.remove("format");
    }
}

fn quantity(about: Option<&Value>) -> Value {
    let mut out = json!({
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "pattern": QUANTITY,
        "x-kubernetes-int-or-string": true,
    });
    if let Some(about) = about {
        out["description"] = about.clone();
    }
    out
}

fn is_limit(name: &str) -> bool {
    name == "containerConcurrency" || name.ends_with("imeoutSeconds")
}
