//! A decoder with its tokenizer, by name.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::thread::{self, ThreadId};

use burn::tensor::{DType, Device};
use kv_gguf::GgufFile;
use kv_parallel::{Collective, Solo};
use serde_json::{Map, Value};

use crate::special_tokens::SpecialTokens;
use crate::{
    ChatTemplate, Llama, Message, ModelConfig, ModelError, PRESETS, Result, Tokenizer, Weights,
    preset, resolve,
};

/// Prefix of models with random weights.
const RANDOM: &str = "random:";

/// Files of the embedded model.
#[cfg(feature = "needle-1m")]
mod embedded {
    pub(super) const NAME: &str = "needle-1m";
    pub(super) const CONFIG: &str = include_str!("../assets/needle-1m/config.json");
    pub(super) const WEIGHTS: &[u8] = include_bytes!("../assets/needle-1m/model.safetensors");
    pub(super) const TOKENIZER: &[u8] = include_bytes!("../assets/needle-1m/tokenizer.json");
}

/// A decoder, and what turns text into its tokens and back.
#[derive(Debug)]
pub struct Model {
    name: String,
    llama: Llama,
    tokenizer: Option<Tokenizer>,
    /// `None` without a chat template, an error's reason for one that does not parse: it fails
    /// where it is used, not where the model is loaded.
    chat: Option<std::result::Result<ChatTemplate, String>>,
    /// The thread that loaded the model.
    home: ThreadId,
    /// [`Self::fingerprint`], once it is known.
    fingerprint: OnceLock<String>,
}

impl Model {
    /// Loads a model: a local folder, a GGUF file, a hub id (`org/name`), `random:PRESET`, or
    /// `needle-1m`, which is embedded. Weights and activations have the type `dtype`; `None` takes
    /// f32 on the CPU and the model's own type elsewhere. On a CPU, [`Self::with_matrices_in`]
    /// stores matrices in half the bytes.
    ///
    /// ```
    /// use kv_models::Model;
    ///
    /// let device = kv_core::select_device("cpu".parse()?)?;
    /// let model = Model::load("needle-1m", &device, None)?;
    /// let tokens = model.encode("The boat lay upon the sand.")?;
    /// assert_eq!(model.decode(&tokens)?, "The boat lay upon the sand.");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ModelError`] says what is missing or unsupported.
    pub fn load(name: &str, device: &Device, dtype: Option<DType>) -> Result<Self> {
        Self::load_part(name, device, dtype, Arc::new(Solo))
    }

    /// [`Self::load`] of one rank's part of the model: see [`Llama::from_weights`]. All ranks call
    /// the same methods of their parts in the same order.
    ///
    /// # Errors
    /// The errors of [`Self::load`], and [`kv_parallel::ParallelError::Indivisible`].
    pub fn load_part(
        name: &str,
        device: &Device,
        dtype: Option<DType>,
        ranks: Arc<dyn Collective>,
    ) -> Result<Self> {
        if let Some(preset_name) = name.strip_prefix(RANDOM) {
            let config = preset(preset_name)?;
            let dtype = dtype.unwrap_or_else(|| default_dtype(config.dtype, device));
            let llama = Llama::random(config, dtype, device, ranks)?;
            let (home, fingerprint) = (thread::current().id(), OnceLock::new());
            return Ok(Self {
                name: name.into(),
                llama,
                tokenizer: None,
                chat: None,
                home,
                fingerprint,
            });
        }
        #[cfg(feature = "needle-1m")]
        if name == embedded::NAME && !Path::new(name).is_dir() {
            let config = ModelConfig::from_json(embedded::CONFIG)?;
            let weights = Weights::from_bytes(embedded::WEIGHTS)?;
            let own = config.dtype.or(weights.dtype());
            let dtype = dtype.unwrap_or_else(|| default_dtype(own, device));
            return Ok(Self {
                name: name.into(),
                llama: Llama::from_weights(config, &weights, dtype, device, ranks)?,
                tokenizer: Some(Tokenizer::from_bytes(embedded::TOKENIZER)?),
                chat: None,
                home: thread::current().id(),
                fingerprint: OnceLock::new(),
            });
        }
        let path = Path::new(name);
        if path.is_file() && path.extension().is_some_and(|extension| extension == "gguf") {
            return Self::gguf_part(path, device, dtype, ranks);
        }
        let model = Self::folder_part(&resolve(name)?, device, dtype, ranks)?;
        // A hub model's folder is named by its revision.
        let local = Path::new(name).is_dir();
        Ok(if local { model } else { Self { name: name.into(), ..model } })
    }

    /// Loads a folder in the Hugging Face layout.
    ///
    /// # Errors
    /// The errors of [`Self::load`].
    pub fn from_folder(folder: &Path, device: &Device, dtype: Option<DType>) -> Result<Self> {
        Self::folder_part(folder, device, dtype, Arc::new(Solo))
    }

    /// A rank's part of a folder in the Hugging Face layout.
    fn folder_part(
        folder: &Path,
        device: &Device,
        dtype: Option<DType>,
        ranks: Arc<dyn Collective>,
    ) -> Result<Self> {
        let mut config = ModelConfig::from_folder(folder)?;
        let tokenizer = folder.join("tokenizer.json");
        let tokenizer =
            tokenizer.is_file().then(|| Tokenizer::from_file(&tokenizer)).transpose()?;
        if config.eos_token_ids.is_empty() {
            let special = SpecialTokens::from_folder(folder)?;
            let id = |tokenizer: &Tokenizer| tokenizer.token_id(special.get("eos_token")?);
            config.eos_token_ids.extend(tokenizer.as_ref().and_then(id));
        }
        let weights = Weights::open(folder)?;
        let own = config.dtype.or(weights.dtype());
        let dtype = dtype.unwrap_or_else(|| default_dtype(own, device));
        let chat = match ChatTemplate::from_folder(folder) {
            Ok(chat) => Some(Ok(chat)),
            Err(ModelError::MissingChatTemplate { .. }) => None,
            Err(ModelError::ChatTemplate { reason }) => Some(Err(reason)),
            Err(error) => return Err(error),
        };
        let name = folder.file_name().unwrap_or(folder.as_os_str());
        Ok(Self {
            name: name.to_string_lossy().into_owned(),
            llama: Llama::from_weights(config, &weights, dtype, device, ranks)?,
            tokenizer,
            chat,
            home: thread::current().id(),
            fingerprint: OnceLock::new(),
        })
    }

    /// Loads a GGUF file of a Llama-family model, dequantised.
    ///
    /// # Errors
    /// [`ModelError::Gguf`] for a file that is damaged or of another architecture, and the errors
    /// of [`Self::load`].
    pub fn from_gguf(path: &Path, device: &Device, dtype: Option<DType>) -> Result<Self> {
        Self::gguf_part(path, device, dtype, Arc::new(Solo))
    }

    /// A rank's part of a GGUF file.
    fn gguf_part(
        path: &Path,
        device: &Device,
        dtype: Option<DType>,
        ranks: Arc<dyn Collective>,
    ) -> Result<Self> {
        let failed = |source| ModelError::gguf(path, source);
        let file = GgufFile::open(path).map_err(failed)?;
        let config = ModelConfig::from_json(&file.config().map_err(failed)?.to_string())?;
        let tokenizer = file.tokenizer().map_err(failed)?.to_string();
        let chat = file.chat_template();
        let chat = chat.map(|chat| ChatTemplate::new(chat).map_err(|error| error.to_string()));
        let dtype = dtype.unwrap_or_else(|| default_dtype(config.dtype, device));
        let weights = Weights::from_gguf(path, file);
        let name = path.file_stem().unwrap_or(path.as_os_str());
        Ok(Self {
            name: name.to_string_lossy().into_owned(),
            llama: Llama::from_weights(config, &weights, dtype, device, ranks)?,
            tokenizer: Some(Tokenizer::from_bytes(tokenizer.as_bytes())?),
            chat,
            home: thread::current().id(),
            fingerprint: OnceLock::new(),
        })
    }

    /// Stores all matrices in `dtype`, f16 or bf16, while the model computes in f32: see
    /// [`Llama::with_matrices_in`].
    ///
    /// # Errors
    /// [`ModelError::MatrixStorage`] outside the CPU, for a model that does not compute in f32, and
    /// for numbers that f16 does not hold.
    pub fn with_matrices_in(mut self, dtype: DType) -> Result<Self> {
        self.llama = self.llama.with_matrices_in(dtype)?;
        Ok(self)
    }

    /// The model's name, for reports.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The fingerprint that tells this model from others of its name in saved caches: its shape,
    /// a checksum of its last norm's weights, and which rank's part it is.
    ///
    /// # Errors
    /// [`ModelError`] where the weights cannot be read.
    pub fn fingerprint(&self) -> Result<String> {
        // Every session asks for it, and reading the device would wait for all of its work.
        if let Some(known) = self.fingerprint.get() {
            return Ok(known.clone());
        }
        let config = self.config();
        let (layers, heads, dim) = (config.num_layers, config.num_kv_heads, config.head_dim);
        let sum = fnv_1a(self.llama.last_norm()?.into_iter().flat_map(f32::to_le_bytes));
        let shard = self.llama.ranks().shard();
        let part = if shard.is_part() { format!(", {shard}") } else { String::new() };
        let own = format!("{} ({layers} x {heads} x {dim}, {sum:016x}{part})", self.name);
        Ok(self.fingerprint.get_or_init(|| own).clone())
    }

    /// The thread that loaded the model.
    pub(crate) fn home(&self) -> ThreadId {
        self.home
    }

    /// The decoder.
    pub fn llama(&self) -> &Llama {
        &self.llama
    }

    /// The decoder's configuration.
    pub fn config(&self) -> &ModelConfig {
        self.llama.config()
    }

    /// The tokenizer; models with random weights have none.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// Takes another tokenizer, such as for random weights, which have none.
    pub fn set_tokenizer(&mut self, tokenizer: Tokenizer) {
        self.tokenizer = Some(tokenizer);
    }

    /// Tokens of a prompt, with the special ones that the model's tokenizer puts before a text (a
    /// Llama's or Mistral's beginning of sequence).
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`], also for models without one.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.need_tokenizer()?.encode(text, true)
    }

    /// Tokens of a text that goes on behind others, without special ones.
    ///
    /// # Errors
    /// The errors of [`Self::encode`].
    pub fn encode_continuation(&self, text: &str) -> Result<Vec<u32>> {
        self.need_tokenizer()?.encode(text, false)
    }

    /// Text of tokens, without special ones.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`], also for models without one.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.need_tokenizer()?.decode(tokens, true)
    }

    /// Tokens of a conversation, by the model's own chat template, ending with what makes the model
    /// answer.
    ///
    /// # Errors
    /// [`ModelError::MissingChatTemplate`]; [`ModelError::ChatTemplate`], also for a template that
    /// does not parse; [`ModelError::Tokenizer`].
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>> {
        self.encode_chat_with(messages, &Map::new())
    }

    /// [`Self::encode_chat`] with variables of the template, such as `enable_thinking` of Qwen3.
    ///
    /// # Errors
    /// The errors of [`Self::encode_chat`].
    pub fn encode_chat_with(
        &self,
        messages: &[Message],
        variables: &Map<String, Value>,
    ) -> Result<Vec<u32>> {
        let template =
            variables.iter().fold(self.chat_template()?.clone(), |template, (name, value)| {
                template.with_variable(name, value)
            });
        self.encode_continuation(&template.render(messages, true)?)
    }

    /// The model's own chat template.
    ///
    /// # Errors
    /// [`ModelError::MissingChatTemplate`]; [`ModelError::ChatTemplate`] for one that does not
    /// parse.
    pub fn chat_template(&self) -> Result<&ChatTemplate> {
        match &self.chat {
            Some(Ok(template)) => Ok(template),
            Some(Err(reason)) => Err(ModelError::ChatTemplate { reason: reason.clone() }),
            None => Err(ModelError::MissingChatTemplate { path: self.name.clone().into() }),
        }
    }

    fn need_tokenizer(&self) -> Result<&Tokenizer> {
        let reason = || format!("the model `{}` has no tokenizer.json", self.name);
        self.tokenizer.as_ref().ok_or_else(|| ModelError::Tokenizer { reason: reason() })
    }
}

impl ModelConfig {
    /// The configuration of a model by the name that [`Model::load`] takes, without its weights
    /// (though a model of the hub is downloaded with them).
    ///
    /// # Errors
    /// The errors of [`Model::load`].
    pub fn from_name(name: &str) -> Result<Self> {
        if let Some(preset_name) = name.strip_prefix(RANDOM) {
            return preset(preset_name);
        }
        #[cfg(feature = "needle-1m")]
        if name == embedded::NAME && !Path::new(name).is_dir() {
            return Self::from_json(embedded::CONFIG);
        }
        Self::from_folder(resolve(name)?)
    }
}

impl ChatTemplate {
    /// The chat template of a model by the name that [`Model::load`] takes, without its weights
    /// (though a model of the hub is downloaded with them): a program can look at the template
    /// before it loads the weights.
    ///
    /// # Errors
    /// [`ModelError::MissingChatTemplate`] for models without one, random and embedded ones among
    /// them; [`ModelError::ChatTemplate`] for one that does not parse; the errors of finding the
    /// model.
    pub fn from_name(name: &str) -> Result<Self> {
        let embedded = model_names().iter().any(|known| known == name) && !Path::new(name).is_dir();
        if embedded || name.starts_with(RANDOM) {
            return Err(ModelError::MissingChatTemplate { path: name.into() });
        }
        Self::from_folder(&resolve(name)?)
    }
}

/// Names that [`Model::load`] takes without a folder or a hub.
pub fn model_names() -> Vec<String> {
    let embedded = cfg!(feature = "needle-1m").then(|| "needle-1m".to_string());
    embedded.into_iter().chain(PRESETS.iter().map(|name| format!("{RANDOM}{name}"))).collect()
}

/// A model's own type; f32 where half precision is slow or unknown to the device.
fn default_dtype(own: Option<DType>, device: &Device) -> DType {
    let cpu = kv_core::device_name(device) == "cpu";
    own.filter(|own| !cpu && device.supports_dtype(*own)).unwrap_or(DType::F32)
}

/// The 64-bit FNV-1a checksum of bytes.
pub(crate) fn fnv_1a(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
