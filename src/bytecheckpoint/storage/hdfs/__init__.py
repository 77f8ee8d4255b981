"""HDFS, through hdfs-native."""
