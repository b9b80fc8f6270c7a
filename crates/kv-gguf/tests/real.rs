//! A published model, compared with its Hugging Face folder.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

use kv_gguf::GgufFile;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use tokenizers::Tokenizer;

use crate::tokenizer::{ids, load};

const FILE: &str = "KV_GGUF_FILE";
const FOLDER: &str = "KV_GGUF_FOLDER";

const TEXTS: [&str; 12] = [
    "The quick brown fox doesn't jump over 13 lazy dogs in 2024; it'll sleep.",
    "  leading, trailing and   inner spaces \t and tabs  \n\n\n and lines\r\n",
    "fn main() {\n    let x: Vec<u32> = (0..10).map(|i| i * 2).collect();\n}\n",
    "def f(n):\n\treturn 1 if n < 2 else n * f(n - 1)  # 0x1F, 3.14e-10\n",
    "中文分词测试，没有空格。第１２章",
    "日本語とEnglishの混在、한국어도 있습니다",
    "🙂👩‍👩‍👧🇫🇷 café cafe\u{301} Straße ½ Ⅷ ١٢٣",
    "<|im_start|>system\nHelp.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>a<|im_end|> <|im_end|><repo_name>x<|not_a_token|>",
    "\u{a0}non-breaking\u{2003}em\u{200b}zero",
    "",
    "\0control\u{7f}\u{1b}[0m",
];

/// The paths, unless an environment variable is absent.
fn paths(test: &str) -> Option<(PathBuf, PathBuf)> {
    match (std::env::var_os(FILE), std::env::var_os(FOLDER)) {
        (Some(file), Some(folder)) => Some((file.into(), folder.into())),
        _ => {
            skip(test);
            None
        }
    }
}

/// Says why a test did not run, on the terminal and in the report of `cargo xtask test`.
fn skip(test: &str) {
    let why = format!(
        "set {FILE} to a GGUF file of a model, and {FOLDER} to a folder with the same model in \
         Hugging Face's form"
    );
    eprintln!("SKIP {test}: {why}");
    let Some(path) = std::env::var_os("KV_TEST_REPORT") else { return };
    let mut report = OpenOptions::new().create(true).append(true).open(path).unwrap();
    // One write a line, so that tests in parallel do not mix theirs.
    report.write_all(format!("skip {test}: {why}\n").as_bytes()).unwrap();
}

fn json(path: PathBuf) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_published_model_is_that_of_its_folder() {
    let Some((file, folder)) = paths("a_published_model_is_that_of_its_folder") else { return };
    let file = GgufFile::open(&file).unwrap();
    let config = file.config().unwrap();
    for (key, expected) in json(folder.join("config.json")).as_object().unwrap() {
        assert_eq!(&config[key], expected, "{key}");
    }
    let settings = json(folder.join("tokenizer_config.json"));
    assert_eq!(file.chat_template(), settings["chat_template"].as_str());
}

#[test]
fn a_published_tokenizer_is_that_of_its_folder() {
    let Some((file, folder)) = paths("a_published_tokenizer_is_that_of_its_folder") else { return };
    let file = GgufFile::open(&file).unwrap();
    let (ours, theirs) =
        (load(&file), Tokenizer::from_file(folder.join("tokenizer.json")).unwrap());
    assert_eq!(ours.get_vocab(true), theirs.get_vocab(true));
    let template = file.chat_template().unwrap_or_default();
    for text in TEXTS.into_iter().chain([template]) {
        for special in [false, true] {
            let found = ids(&ours, text, special);
            assert_eq!(found, ids(&theirs, text, special), "{text:?}");
            let decode = |tokenizer: &Tokenizer| tokenizer.decode(&found, special).unwrap();
            assert_eq!(decode(&ours), decode(&theirs));
        }
    }
}

#[test]
fn published_weights_are_those_of_their_folder() {
    let Some((file, folder)) = paths("published_weights_are_those_of_their_folder") else { return };
    let file = GgufFile::open(&file).unwrap();
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let theirs = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensors().count(), theirs.len());
    for tensor in file.tensors() {
        let expected = theirs.tensor(&tensor.name).unwrap();
        assert_eq!((expected.shape(), expected.dtype()), (&tensor.shape[..], Dtype::F16));
        let numbers = file.read(&tensor.name).unwrap();
        assert_eq!(2 * numbers.len(), expected.data().len());
        let differing =
            numbers.iter().zip(expected.data().chunks_exact(2)).find(|(ours, bytes)| {
                let rounded = half::f16::from_f32(**ours);
                rounded != half::f16::from_le_bytes([bytes[0], bytes[1]])
            });
        assert_eq!(differing, None, "{}", tensor.name);
    }
}
