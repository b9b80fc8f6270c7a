//! Names and shapes of tensors, in the file and in Hugging Face's form.

use std::collections::BTreeSet;

use crate::GgufError;
use crate::layout::Stored;
use crate::model::Model;

/// The factors of the rotary embedding's frequencies. The config has them, as a rule.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// A tensor's place in the model.
#[derive(Debug)]
pub(crate) struct Named {
    /// The name in Hugging Face's form.
    pub(crate) name: String,
    /// Of queries and keys, whose rows have another order in the file: the number of heads.
    pub(crate) rotated_heads: Option<usize>,
    /// Which tensor of the file it is.
    pub(crate) index: usize,
}

/// A kind of tensor: its name in the file, its name in Hugging Face's form, and its shape.
type Kind = (&'static str, &'static str, fn(&Model) -> [usize; 2]);

const QUERY: &str = "attn_q";
const KEY: &str = "attn_k";
const LAYER_MATRICES: [Kind; 7] = [
    (QUERY, "self_attn.q_proj", |m| [m.heads * m.head_dim, m.hidden]),
    (KEY, "self_attn.k_proj", |m| [m.kv_heads * m.head_dim, m.hidden]),
    ("attn_v", "self_attn.v_proj", |m| [m.kv_heads * m.head_dim, m.hidden]),
    ("attn_output", "self_attn.o_proj", |m| [m.hidden, m.heads * m.head_dim]),
    ("ffn_gate", "mlp.gate_proj", |m| [m.intermediate, m.hidden]),
    ("ffn_up", "mlp.up_proj", |m| [m.intermediate, m.hidden]),
    ("ffn_down", "mlp.down_proj", |m| [m.hidden, m.intermediate]),
];
const LAYER_NORMS: [(&str, &str); 2] =
    [("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")];

/// Names all tensors and checks their shapes, and that none is absent.
pub(crate) fn name_all(model: &Model, stored: &[Stored]) -> Result<Vec<Named>, GgufError> {
    let mut named = Vec::new();
    for (index, tensor) in stored.iter().enumerate() {
        // Some old files have the frequencies of each layer, which follow from the config.
        if tensor.name == ROPE_FACTORS || tensor.name.ends_with(".attn_rot_embd.weight") {
            continue;
        }
        let (name, expected, rotated_heads) = lookup(model, &tensor.name).ok_or_else(|| {
            GgufError::UnknownTensor { name: tensor.name.clone(), layers: model.layers }
        })?;
        if tensor.shape != expected {
            return Err(GgufError::Shape { name, expected, actual: tensor.shape.clone() });
        }
        named.push(Named { name, rotated_heads, index });
    }
    check_complete(model, stored)?;
    Ok(named)
}

/// The name in Hugging Face's form, the shape, and the heads whose rows have another order.
fn lookup(model: &Model, name: &str) -> Option<(String, Vec<usize>, Option<usize>)> {
    let whole = |name: &str, shape: Vec<usize>| Some((name.to_owned(), shape, None));
    match name {
        "token_embd.weight" => {
            return whole("model.embed_tokens.weight", vec![model.vocab, model.hidden]);
        }
        "output_norm.weight" => return whole("model.norm.weight", vec![model.hidden]),
        "output.weight" => return whole("lm_head.weight", vec![model.vocab, model.hidden]),
        _ => {}
    }
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let number: usize = layer.parse().ok().filter(|number| *number < model.layers)?;
    // One name for a layer: neither `+1` nor `01`.
    if layer != number.to_string() {
        return None;
    }
    let (kind, role) = part.split_once('.')?;
    let name = |theirs: &str| format!("model.layers.{number}.{theirs}.{role}");
    if let Some((_, theirs)) = LAYER_NORMS.iter().find(|(ours, _)| *ours == kind) {
        return (role == "weight").then(|| (name(theirs), vec![model.hidden], None));
    }
    let (_, theirs, shape) = LAYER_MATRICES.iter().find(|(ours, ..)| *ours == kind)?;
    let [rows, width] = shape(model);
    let shape = match role {
        "weight" => vec![rows, width],
        "bias" => vec![rows],
        _ => return None,
    };
    let rotated_heads = match kind {
        QUERY => Some(model.heads),
        KEY => Some(model.kv_heads),
        _ => None,
    };
    Some((name(theirs), shape, rotated_heads))
}

/// Stops at the first absent tensor, so that a claim of many layers costs nothing.
fn check_complete(model: &Model, stored: &[Stored]) -> Result<(), GgufError> {
    let there: BTreeSet<&str> = stored.iter().map(|tensor| tensor.name.as_str()).collect();
    let check = |name: String| match there.contains(name.as_str()) {
        true => Ok(()),
        false => Err(GgufError::MissingTensor { name }),
    };
    check("output_norm.weight".to_owned())?;
    let matrices = LAYER_MATRICES.iter().map(|(name, ..)| name);
    let kinds: Vec<&&str> = matrices.chain(LAYER_NORMS.iter().map(|(name, _)| name)).collect();
    for layer in 0..model.layers {
        kinds.iter().try_for_each(|kind| check(format!("blk.{layer}.{kind}.weight")))?;
    }
    Ok(())
}
