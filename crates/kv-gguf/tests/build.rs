//! Writes GGUF files, right and wrong ones.

/// A value of the metadata, with the number of its type.
#[derive(Clone)]
pub(crate) struct Value {
    kind: u32,
    bytes: Vec<u8>,
}

pub(crate) fn u32(number: u32) -> Value {
    Value { kind: 4, bytes: number.to_le_bytes().into() }
}

pub(crate) fn f32(number: f32) -> Value {
    Value { kind: 6, bytes: number.to_le_bytes().into() }
}

pub(crate) fn flag(value: bool) -> Value {
    Value { kind: 7, bytes: vec![value.into()] }
}

pub(crate) fn text(text: &str) -> Value {
    raw_text(text.as_bytes())
}

pub(crate) fn raw_text(bytes: &[u8]) -> Value {
    Value { kind: 8, bytes: prefixed(bytes) }
}

/// A list. Its items have the type of the first, or u32.
pub(crate) fn list(items: &[Value]) -> Value {
    claimed_list(items, items.len() as u64)
}

/// A list that claims a length.
pub(crate) fn claimed_list(items: &[Value], length: u64) -> Value {
    let kind = items.first().map_or(4, |item| item.kind);
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend(length.to_le_bytes());
    items.iter().for_each(|item| bytes.extend(&item.bytes));
    Value { kind: 9, bytes }
}

/// A text that claims a length.
pub(crate) fn claimed_text(length: u64) -> Value {
    Value { kind: 8, bytes: length.to_le_bytes().into() }
}

pub(crate) fn of_kind(kind: u32, bytes: &[u8]) -> Value {
    Value { kind, bytes: bytes.into() }
}

fn prefixed(bytes: &[u8]) -> Vec<u8> {
    [(bytes.len() as u64).to_le_bytes().as_slice(), bytes].concat()
}

/// The description of a tensor.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: Vec<u8>,
    pub(crate) dims: Vec<u64>,
    pub(crate) kind: u32,
    pub(crate) offset: u64,
}

/// A file.
#[derive(Clone)]
pub(crate) struct File {
    pub(crate) magic: [u8; 4],
    pub(crate) version: [u8; 4],
    pub(crate) entries: Vec<(Vec<u8>, Value)>,
    pub(crate) tensors: Vec<Tensor>,
    /// Claimed numbers of tensors and entries, if not the true ones.
    pub(crate) claims: (Option<u64>, Option<u64>),
    pub(crate) alignment: usize,
    pub(crate) data: Vec<u8>,
}

impl File {
    /// A model of one layer with hidden size 8, two query heads and one key-value head of 4, four
    /// tokens, all numbers f32.
    pub(crate) fn small() -> Self {
        let entries = [
            ("general.architecture", text("llama")),
            ("llama.context_length", u32(32)),
            ("llama.embedding_length", u32(8)),
            ("llama.feed_forward_length", u32(6)),
            ("llama.block_count", u32(1)),
            ("llama.attention.head_count", u32(2)),
            ("llama.attention.head_count_kv", u32(1)),
            ("llama.attention.layer_norm_rms_epsilon", f32(1e-5)),
            ("llama.rope.freq_base", f32(10_000.0)),
            ("llama.rope.dimension_count", u32(4)),
            ("llama.vocab_size", u32(4)),
            ("tokenizer.ggml.model", text("gpt2")),
            ("tokenizer.ggml.pre", text("smollm")),
            ("tokenizer.ggml.tokens", list(&["a", "b", "ab", "<s>"].map(text))),
            ("tokenizer.ggml.token_type", list(&[1, 1, 1, 3].map(u32))),
            ("tokenizer.ggml.merges", list(&[text("a b")])),
            ("tokenizer.ggml.bos_token_id", u32(3)),
            ("tokenizer.ggml.eos_token_id", u32(3)),
        ];
        let mut file = Self {
            magic: *b"GGUF",
            version: 3_u32.to_le_bytes(),
            entries: entries.map(|(key, value)| (key.as_bytes().to_vec(), value)).to_vec(),
            tensors: Vec::new(),
            claims: (None, None),
            alignment: 32,
            data: Vec::new(),
        };
        file.add("token_embd.weight", &[8, 4]);
        for (name, dims) in [
            ("attn_q", [8, 8]),
            ("attn_k", [8, 4]),
            ("attn_v", [8, 4]),
            ("attn_output", [8, 8]),
            ("ffn_gate", [8, 6]),
            ("ffn_up", [8, 6]),
            ("ffn_down", [6, 8]),
        ] {
            file.add(&format!("blk.0.{name}.weight"), &dims);
        }
        file.add("blk.0.attn_norm.weight", &[8]);
        file.add("blk.0.ffn_norm.weight", &[8]);
        file.add("output_norm.weight", &[8]);
        file
    }

    /// Adds a tensor of f32 that counts up.
    pub(crate) fn add(&mut self, name: &str, dims: &[u64]) {
        let numbers = dims.iter().product::<u64>();
        let numbers: Vec<u8> = (0..numbers).flat_map(|n| (n as f32).to_le_bytes()).collect();
        self.add_bytes(name, dims, 0, &numbers);
    }

    pub(crate) fn add_bytes(&mut self, name: &str, dims: &[u64], kind: u32, bytes: &[u8]) {
        let (name, offset) = (name.into(), self.data.len() as u64);
        self.tensors.push(Tensor { name, dims: dims.into(), kind, offset });
        self.data.extend(bytes);
        self.data.resize(self.data.len().next_multiple_of(self.alignment), 0);
    }

    /// Sets a key's value.
    pub(crate) fn set(mut self, key: &str, value: Value) -> Self {
        match self.entries.iter_mut().find(|(other, _)| other == key.as_bytes()) {
            Some((_, old)) => *old = value,
            None => self.entries.push((key.into(), value)),
        }
        self
    }

    pub(crate) fn without(mut self, key: &str) -> Self {
        self.entries.retain(|(other, _)| other != key.as_bytes());
        self
    }

    /// Changes the tensor of this name.
    pub(crate) fn change(mut self, name: &str, change: impl FnOnce(&mut Tensor)) -> Self {
        change(self.tensors.iter_mut().find(|tensor| tensor.name == name.as_bytes()).unwrap());
        self
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = [self.magic, self.version].concat();
        out.extend(self.claims.0.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.claims.1.unwrap_or(self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            out.extend(prefixed(key));
            out.extend(value.kind.to_le_bytes());
            out.extend(&value.bytes);
        }
        for tensor in &self.tensors {
            out.extend(prefixed(&tensor.name));
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(&self.data);
        out
    }
}
